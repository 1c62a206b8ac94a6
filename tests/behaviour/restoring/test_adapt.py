"""What may differ on purpose between a checkpoint and what is asked of it: `ckpt.Adapt`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import ckpt
import ckpt.sync
from ckpt import Adapt
from ckpt.errors import InvalidArgumentError, TargetMismatchError
from ckpt.surgery import concatenate, split, stack, unstack
from ckpt.testing.compare import differences
from tests.support.trees import P, bits, mesh, plain_id, sharded

GOLDEN = Path(__file__).parents[1] / "golden_messages"


def counted(*shape: int, start: int = 0, dtype: Any = np.float32) -> Any:
    return np.arange(start, start + np.prod(shape, dtype=int)).reshape(shape).astype(dtype)


def model() -> dict[str, Any]:
    """Three layers, an embedding, an optimizer that mirrors them, counters."""
    params = {
        "embed": counted(6, 4, start=500),
        "layers": [{"w": counted(4, 8, start=100 * n), "b": counted(8, start=n)} for n in range(3)],
    }
    return {
        "params": params,
        "opt": {"mu": jax.tree.map(lambda leaf: leaf + 0.5, params), "count": jnp.int32(9)},
        "step": 7,
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapt") / "x"
    ckpt.sync.save(path, model())
    return path


def load(path: Path, like: Any = None, **options: Any) -> Any:
    return ckpt.sync.load(path, like=like, adapt=Adapt(**options))


def same(found: Any, wanted: Any) -> None:
    """The same to the bit, but for the order of keys, of which targets have their own."""
    one, other = (jax.tree.map(lambda leaf: leaf, tree) for tree in (wanted, found))
    assert differences(one, other) == []


def zeros(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf * 0, tree)


# -- select ---------------------------------------------------------------------------------------

SELECTIONS: dict[str, tuple[Any, Callable[[str], bool]]] = {
    "a prefix": ("params", lambda path: path.startswith("params.")),
    "a leaf": ("step", lambda path: path == "step"),
    "one star": ("params.layers.*.w", lambda p: p.startswith("params.layers.") and p[-1] == "w"),
    "a part of a key": ("params.emb*", lambda path: path == "params.embed"),
    "two stars": ("**.w", lambda path: path.endswith(".w")),
    "two stars within": ("opt.**.b", lambda p: p.startswith("opt.") and p.endswith(".b")),
    "a predicate": (lambda path: "1" in path, lambda path: "1" in path),
    "several": (
        ["step", "**.embed", lambda path: path == "opt.count"],
        lambda path: path in ("step", "params.embed", "opt.mu.embed", "opt.count"),
    ),
}


def by_path(tree: Any) -> dict[str, Any]:
    def text(path: Any) -> str:
        return jax.tree_util.keystr(path, simple=True, separator=".")

    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {text(path): leaf for path, leaf in pairs}


@pytest.mark.parametrize("name", SELECTIONS)
def test_only_what_is_selected_is_loaded(saved: Path, name: str) -> None:
    select, wanted = SELECTIONS[name]
    target = zeros(model())
    found, bare = load(saved, target, select=select), load(saved, select=select)
    assert jax.tree.structure(found) == jax.tree.structure(target)
    leaves, stored = by_path(model()), by_path(bare)
    for path, leaf in by_path(found).items():
        same(leaf, leaves[path] if wanted(path) else by_path(target)[path])
        if wanted(path):
            same(stored[path], leaves[path])
        else:
            assert stored[path] is ...


def test_what_is_not_selected_keeps_the_very_value_of_the_target(saved: Path) -> None:
    target = zeros(model())
    found = load(saved, target, select="step")
    assert found["params"]["embed"] is target["params"]["embed"]


def test_what_is_not_selected_may_be_abstract_or_left_out_and_is_then_skipped(saved: Path) -> None:
    abstract = jax.ShapeDtypeStruct((6, 4), jnp.float32)
    like: dict[str, Any] = {"params": {"embed": abstract, "layers": ...}, "opt": ..., "step": int}
    found = load(saved, like, select="params.embed")
    same(np.asarray(found["params"].pop("embed")), model()["params"]["embed"])
    assert found == {"params": {"layers": ...}, "opt": ..., "step": ...}
    assert load(saved, {"step": 0}, select="step") == {"step": 7}


@pytest.mark.parametrize(
    ("select", "hint"),
    [
        ("param", "is it 'params'?"),
        ("params.layer", "is it 'params.layers'?"),
        ("params.layer.*.w", "is it 'params.layers.*.w'?"),
        ("opt.muu.layers.0.w", "is it 'opt.mu.layers.0.w'?"),
        ("params.layers.*.kernel", "below 'params.layers.*' there is 'b', 'w'"),
        ("params.layers.7", "below 'params.layers' there is '0', '1', '2'"),
        ("**.embbed", "is it '**.embed'?"),
        ("weights", "at the top there is 'opt', 'params', 'step'"),
        (["step", "param"], "is it 'params'?"),
        (lambda path: False, "covers none"),
        ("params..embed", "covers none"),
    ],
)
def test_a_pattern_that_covers_nothing_is_an_error_that_helps(
    saved: Path, select: Any, hint: str
) -> None:
    for like in (None, model()):
        with pytest.raises(TargetMismatchError) as caught:
            load(saved, like, select=select)
        assert hint in str(caught.value)
        assert "no array was read" in str(caught.value)


# -- rename ---------------------------------------------------------------------------------------


def renamed(tree: Any) -> Any:
    params = {"emb": tree["params"]["embed"], "layers": tree["params"]["layers"]}
    blocks = [{"kernel": layer["w"], "bias": layer["b"]} for layer in params["layers"]]
    return {"net": {"emb": params["emb"], "blocks": blocks}}


RENAMES: dict[str, Any] = {
    "patterns": {
        "params.embed": "net.emb",
        "params.layers.*.w": "net.blocks.*.kernel",
        "params.layers.*.b": "net.blocks.*.bias",
    },
    "a function": lambda path: ".".join(
        {"params": "net", "embed": "emb", "layers": "blocks", "w": "kernel", "b": "bias"}.get(k, k)
        for k in path.split(".")
    ),
}


@pytest.mark.parametrize("how", RENAMES)
def test_leaves_go_to_their_new_paths(saved: Path, how: str) -> None:
    wanted = renamed(model())
    found = load(saved, zeros(wanted), select="params", rename=RENAMES[how])
    same(found, wanted)
    # Without a target: nested dicts, since no stored structure has these paths.
    bare = load(saved, select="params", rename=RENAMES[how])
    assert set(bare) == {"net"}
    same(bare["net"]["blocks"]["2"]["kernel"], wanted["net"]["blocks"][2]["kernel"])
    assert by_path(bare).keys() == by_path(wanted).keys()


def test_a_branch_is_moved_with_all_below_it_and_the_first_pattern_counts(saved: Path) -> None:
    rename = {"params.embed": "head", "params": "", "step": "meta.step"}
    found = load(saved, rename=rename)
    assert sorted(found) == ["head", "layers", "meta", "opt"]
    same(found["layers"]["1"]["b"], model()["params"]["layers"][1]["b"])
    assert found["meta"] == {"step": 7}


def test_a_root_leaf_can_be_moved_below_and_back(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", counted(3))
    same(load(tmp_path / "x", rename={"*": "*"}), counted(3))
    same(load(tmp_path / "x", {"w": counted(3)}, rename={"%root": "w"}), {"w": counted(3)})
    ckpt.sync.save(tmp_path / "y", {"w": counted(3)})
    same(load(tmp_path / "y", zeros(counted(3)), rename={"w": ""}), counted(3))


def test_two_leaves_of_one_new_path_are_an_error(saved: Path) -> None:
    with pytest.raises(TargetMismatchError, match="both become 'w'"):
        load(saved, rename=lambda path: "w")
    with pytest.raises(TargetMismatchError, match=r"both become 'opt.mu.embed'"):
        load(saved, rename={"params": "opt.mu"})


def test_a_leaf_above_others_has_no_place_without_a_target(saved: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="above or below"):
        load(saved, rename={"step": "params"})


def test_a_pattern_that_an_earlier_one_leaves_nothing_is_an_error(saved: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"'params.embed' has no effect.*'params'"):
        load(saved, rename={"params": "net", "params.embed": "head"})
    with pytest.raises(InvalidArgumentError, match="has no effect"):
        load(saved, cast={"**": "float16", "step": "int8"})


def test_what_a_function_returns_has_to_be_a_path(saved: Path) -> None:
    for wrong in (None, 5, "", b"x"):
        with pytest.raises(InvalidArgumentError, match="expected a leaf path"):
            load(saved, rename=lambda path, wrong=wrong: wrong)


# -- missing and extra ----------------------------------------------------------------------------


def test_a_leaf_that_is_not_stored_keeps_its_value_if_it_may(saved: Path) -> None:
    like = {
        **zeros(model()),
        "adapter": {"scale": jnp.ones(2), "rank": 4, "key": jax.random.key(1)},
    }
    with pytest.raises(TargetMismatchError) as caught:
        load(saved, like)
    assert len(caught.value.problems) == 3
    found = load(saved, like, missing="keep")
    assert found["adapter"]["scale"] is like["adapter"]["scale"]
    same(found, {**model(), "adapter": like["adapter"]})


@pytest.mark.parametrize("wanted", [jax.ShapeDtypeStruct((2,), jnp.float32), int, float])
def test_a_leaf_that_has_no_value_cannot_keep_it(saved: Path, wanted: Any) -> None:
    with pytest.raises(TargetMismatchError, match=r"adapter: .*no value to keep"):
        load(saved, {**zeros(model()), "adapter": wanted}, missing="keep")


def test_what_the_target_does_not_have_is_left_out_if_it_may(saved: Path) -> None:
    like = {"params": zeros(model())["params"]}
    with pytest.raises(TargetMismatchError) as caught:
        load(saved, like)
    assert len(caught.value.problems) == 9
    same(load(saved, like, extra="ignore"), {"params": model()["params"]})
    # Shapes still have to fit.
    like["params"]["embed"] = np.zeros((6, 5), np.float32)
    with pytest.raises(TargetMismatchError, match=r"params\.embed"):
        load(saved, like, extra="ignore", missing="keep")


# -- cast -----------------------------------------------------------------------------------------


def test_one_dtype_casts_arrays_of_its_kind_only(saved: Path) -> None:
    for like in (None, zeros(model())):
        found = load(saved, like, cast=jnp.bfloat16)
        assert found["step"] == 7
        assert found["opt"]["count"].dtype == jnp.int32
        for array in jax.tree.leaves([found["params"], found["opt"]["mu"]]):
            assert array.dtype == jnp.bfloat16
        np.testing.assert_array_equal(
            found["params"]["embed"], model()["params"]["embed"].astype(jnp.bfloat16)
        )


def test_a_mapping_casts_what_it_covers_across_kinds(saved: Path) -> None:
    cast = {"params.embed": "int32", "params": np.float16, "opt.count": float}
    found = load(saved, cast={**cast, "opt.count": "float32"})
    assert found["params"]["embed"].dtype == np.int32
    assert found["params"]["layers"][0]["w"].dtype == np.float16
    assert found["opt"]["mu"]["embed"].dtype == np.float32
    assert isinstance(found["opt"]["count"], jax.Array)
    assert (found["opt"]["count"].dtype, float(found["opt"]["count"])) == (jnp.float32, 9.0)
    with pytest.raises(TargetMismatchError, match="jax_enable_x64"):
        load(saved, cast=cast)


def test_a_cast_reaches_one_place_of_a_shared_array_and_not_the_other(tmp_path: Path) -> None:
    shared = jnp.arange(4.0)
    ckpt.sync.save(tmp_path / "x", {"a": shared, "b": shared})
    for like in (None, {"a": shared, "b": shared}):
        found = load(tmp_path / "x", like, cast={"a": "float16"})
        assert (found["a"].dtype, found["b"].dtype) == (jnp.float16, jnp.float32)


# -- resize ---------------------------------------------------------------------------------------


def resized(array: Any, shape: tuple[int, ...]) -> Any:
    whole = np.zeros(shape, array.dtype)
    common = tuple(slice(min(a, b)) for a, b in zip(array.shape, shape, strict=True))
    whole[common] = array[common]
    return whole


@pytest.mark.parametrize(
    ("shape", "choices"),
    [
        ((9, 4), {"pad", "both"}),
        ((6, 7), {"pad", "both"}),
        ((5, 4), {"truncate", "both"}),
        ((0, 4), {"truncate", "both"}),
        ((2, 3), {"truncate", "both"}),
        ((9, 2), {"both"}),
        ((3, 8), {"both"}),
        ((24,), set()),
        ((6, 4, 1), set()),
    ],
)
def test_an_array_is_brought_to_another_shape_if_it_may(
    saved: Path, shape: tuple[int, ...], choices: set[str]
) -> None:
    stored = model()["params"]["embed"]
    for like in (np.ones(shape, np.float32), jax.ShapeDtypeStruct(shape, jnp.float32)):
        target = {"params": {"embed": like}}
        for choice in ("pad", "truncate", "both"):
            options: dict[str, Any] = {"select": "params.embed", "resize": choice}
            if choice in choices:
                found = load(saved, target, **options)["params"]["embed"]
                np.testing.assert_array_equal(np.asarray(found), resized(stored, shape))
                continue
            with pytest.raises(TargetMismatchError, match=r"params\.embed: .*wanted shape"):
                load(saved, target, **options)


def test_arrays_are_resized_by_pattern_onto_many_devices(saved: Path) -> None:
    placed = NamedSharding(mesh(2, 4), P("data", "model"))
    like = {
        "params": {
            "embed": jax.ShapeDtypeStruct((10, 4), jnp.float32, sharding=placed),
            "layers": [
                {
                    "w": jax.ShapeDtypeStruct((2, 12), jnp.bfloat16, sharding=placed),
                    "b": np.zeros(3, np.float32),
                }
            ]
            * 3,
        }
    }
    rules = {"**.embed": "pad", "**.w": "both", "**.b": "truncate"}
    found = load(saved, like, select="params", resize=rules)["params"]
    params = model()["params"]
    assert found["embed"].sharding == placed
    np.testing.assert_array_equal(np.asarray(found["embed"]), resized(params["embed"], (10, 4)))
    for layer, stored in zip(found["layers"], params["layers"], strict=True):
        wanted = resized(stored["w"], (2, 12)).astype(jnp.bfloat16)
        assert bits(layer["w"]) == wanted.tobytes()
        same(layer["b"], stored["b"][:3])
    with pytest.raises(TargetMismatchError) as caught:
        load(saved, like, select="params", resize={"**.embed": "truncate"})
    assert len(caught.value.problems) == 7


# -- transforms -----------------------------------------------------------------------------------


def stacked() -> dict[str, Any]:
    layers = model()["params"]["layers"]
    return {name: np.stack([layer[name] for layer in layers]) for name in ("w", "b")}


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_layers_are_stacked_and_a_stack_is_unstacked(
    tmp_path: Path, saved: Path, axis: int
) -> None:
    layers = model()["params"]["layers"]
    wanted = {name: np.stack([layer[name] for layer in layers], axis=axis) for name in ("w", "b")}
    up = [stack("params.layers.*", to="layers", axis=axis)]
    same(load(saved, select="params.layers", transforms=up), {"layers": wanted})
    like = {"layers": zeros(wanted)}
    same(load(saved, like, select="params.layers", transforms=up), {"layers": wanted})
    ckpt.sync.save(tmp_path / "x", {"layers": wanted})
    down = [unstack("layers", to="params.layers.*", axis=axis)]
    target = {"params": {"layers": zeros(layers)}}
    same(load(tmp_path / "x", target, transforms=down), {"params": {"layers": layers}})


def test_stacks_are_in_the_order_of_their_numbers_and_told_apart_by_other_stars(
    tmp_path: Path,
) -> None:
    tree = {side: {f"layer_{n}": counted(2, start=n) for n in range(12)} for side in ("up", "down")}
    ckpt.sync.save(tmp_path / "x", tree)
    found = load(tmp_path / "x", transforms=[stack("*.layer_*", to="*.all")])
    same(found["up"]["all"], np.stack([counted(2, start=n) for n in range(12)]))
    assert sorted(found) == ["down", "up"]
    with pytest.raises(TargetMismatchError, match="both number '0'"):
        load(tmp_path / "x", transforms=[stack("**.layer_*", to="all")])


def test_parts_are_concatenated_and_a_whole_is_split(tmp_path: Path) -> None:
    parts = [counted(4, n, start=10 * n) for n in (3, 1, 2)]
    tree = {f"l{n}": dict(zip("qkv", parts, strict=True)) for n in range(2)}
    whole = {f"l{n}": {"qkv": np.concatenate(parts, axis=1)} for n in range(2)}
    ckpt.sync.save(tmp_path / "parts", tree)
    ckpt.sync.save(tmp_path / "whole", whole)
    together = concatenate(["*.q", "*.k", "*.v"], to="*.qkv", axis=-1)
    apart = split("*.qkv", to=["*.q", "*.k", "*.v"], axis=1, sizes=[3, 1, 2])
    same(load(tmp_path / "parts", zeros(whole), transforms=[together]), whole)
    same(load(tmp_path / "whole", zeros(tree), transforms=[apart]), tree)
    same(load(tmp_path / "parts", zeros(tree), transforms=[together, apart]), tree)
    halves = load(tmp_path / "whole", transforms=[split("*.qkv", to=["*.a", "*.b"], axis=0)])
    same(halves["l1"], {"a": whole["l1"]["qkv"][:2], "b": whole["l1"]["qkv"][2:]})


TO_DEVICES: dict[str, tuple[Any, Any]] = {
    "stack": ([stack("layers.*", to="all")], lambda a: {"all": np.stack(a)}),
    "stack last": ([stack("layers.*", to="all", axis=-1)], lambda a: {"all": np.stack(a, -1)}),
    "concatenate": (
        [concatenate([f"layers.{n}" for n in range(8)], to="all")],
        lambda a: {"all": np.concatenate(a)},
    ),
    "unstack": (
        [stack("layers.*", to="all"), unstack("all", to="each.*", axis=1)],
        lambda a: {"each": list(np.moveaxis(np.stack(a), 1, 0))},
    ),
    "split": (
        [split("layers.*", to=["left.*", "right.*"], axis=1)],
        lambda a: {"left": [x[:, :4] for x in a], "right": [x[:, 4:] for x in a]},
    ),
}


@pytest.mark.parametrize("spec", [P("data"), P(None, "model"), P(("data", "model")), P()], ids=str)
@pytest.mark.parametrize("name", TO_DEVICES)
def test_what_is_put_together_goes_to_the_devices_that_want_it(
    tmp_path: Path, name: str, spec: P
) -> None:
    arrays = [counted(16, 8, start=1000 * n) for n in range(8)]
    tree = {"layers": [sharded(array, "model", "data") for array in arrays]}
    ckpt.sync.save(tmp_path / "x", tree)
    transforms, expected = TO_DEVICES[name]
    sharding = NamedSharding(mesh(2, 4), spec)
    wanted = expected(arrays)
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=sharding), wanted
    )
    found = load(tmp_path / "x", like, transforms=transforms)
    for array, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert array.sharding == sharding
        assert bits(array) == other.astype(jnp.bfloat16).tobytes()


SURGERY_ERRORS: dict[str, Any] = {
    "stack_covers_nothing": stack("params.layer.*", to="layers"),
    "stack_of_other_shapes": stack("params.layers.0.*", to="all"),
    "stack_axis": stack("params.layers.*.w", to="w", axis=3),
    "stack_onto_another_leaf": stack("params.layers.*.w", to="step"),
    "unstack_scalar": unstack("step", to="steps.*"),
    "unstack_axis": unstack("params.layers.*.b", to="b.*.*", axis=1),
    "concatenate_parts": concatenate(["params.layers.*.w", "params.embed*"], to="all*"),
    "concatenate_other_dtype": concatenate(["params.layers.0.b", "opt.count"], to="all"),
    "split_unequal": split("params.layers.*.b", to=["x.*", "y.*", "z.*"]),
    "split_sizes": split("params.embed", to=["x", "y"], sizes=[1, 2]),
    "split_onto_one_path": split("params.layers.*.b", to=["x.*", "x.*"]),
}


@pytest.mark.parametrize("name", SURGERY_ERRORS)
def test_what_cannot_be_put_together_is_an_error_that_says_why(saved: Path, name: str) -> None:
    with pytest.raises(TargetMismatchError) as caught:
        load(saved, transforms=[SURGERY_ERRORS[name]])
    golden(name, caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: stack("layers", to="layers"),
        lambda: stack("layers.**", to="layers"),
        lambda: stack("layers.*", to="layers.*"),
        lambda: stack("", to="layers"),
        lambda: stack("layers.*", to=""),
        lambda: stack("layers.*", to="layers", axis=0.5),  # type: ignore[arg-type]
        lambda: stack(5, to="layers"),  # type: ignore[arg-type]
        lambda: unstack("layers", to="layers"),
        lambda: unstack("layers", to=None),  # type: ignore[arg-type]
        lambda: concatenate("qkv", to="all"),
        lambda: concatenate([], to="all"),
        lambda: concatenate(["*.q", "k"], to="*.all"),
        lambda: split("all", to="qkv"),
        lambda: split("all", to=[]),
        lambda: split("*.all", to=["q", "k"]),
        lambda: split("all", to=["q", "k"], sizes=[1]),
        lambda: split("all", to=["q", "k"], sizes=[1.5, 0.5]),  # type: ignore[list-item]
        lambda: split("all", to=["q", "k"], sizes=[3, -1]),
        lambda: split("all", to=["q", "k"], sizes=4),  # type: ignore[arg-type]
        lambda: split("all", to=["q", "k"], axis=None),  # type: ignore[arg-type]
    ],
)
def test_a_transform_that_cannot_be_meant_is_refused_when_it_is_made(
    make: Callable[[], Any],
) -> None:
    with pytest.raises(InvalidArgumentError):
        make()


# -- all together ---------------------------------------------------------------------------------


def test_selected_renamed_stacked_cast_and_resized_in_one_go(saved: Path) -> None:
    reports: list[ckpt.RestoreReport] = []
    wanted = {
        "net": {
            "layers": {name: each.astype(jnp.bfloat16) for name, each in stacked().items()},
            "embed": resized(model()["params"]["embed"], (8, 4)).astype(jnp.bfloat16),
            "head": np.ones(3),
        },
        "step": 7,
    }
    like = zeros(wanted)
    like["net"]["head"] = wanted["net"]["head"]
    found = load(
        saved,
        like,
        select=["params", "step"],
        rename={"params": "net"},
        transforms=[stack("net.layers.*", to="net.layers")],
        resize={"net.embed": "pad"},
        cast=jnp.bfloat16,
        missing="keep",
        report=reports.append,
    )
    same(found, wanted)
    (report,) = reports
    stored = by_path(model())
    chosen = [path for path in stored if path.startswith(("params", "step"))]
    assert list(report.used) == chosen
    assert set(report.unused) == stored.keys() - set(chosen)
    assert report.kept == ("net.head",)
    assert report.item == "state"


def test_a_report_tells_used_unused_and_kept_apart(saved: Path) -> None:
    reports: list[ckpt.RestoreReport] = []
    like = {**zeros(model()), "more": 5}
    like["opt"]["mu"] = ...
    load(saved, like, select=["params", "opt"], missing="keep", report=reports.append)
    (report,) = reports
    stored = list(by_path(model()))
    assert set(report.used) == {path for path in stored if path.startswith(("params", "opt.count"))}
    assert sorted((*report.used, *report.unused)) == sorted(stored)
    assert set(report.kept) == {"step", "more"}
    load(saved, report=reports.append)
    assert reports[1].used == tuple(stored)
    assert reports[1].unused == reports[1].kept == ()


def test_each_of_several_items_has_rules_of_its_own(tmp_path: Path) -> None:
    reports: list[ckpt.RestoreReport] = []
    items = {"state": model(), "ema": model()["params"]}
    ckpt.sync.save(tmp_path / "x", items=items)
    found = ckpt.sync.load(
        tmp_path / "x",
        like={"state": {"step": 0}, "ema": zeros(items["ema"])},
        adapt={
            "state": Adapt(select="step", report=reports.append),
            "ema": Adapt(cast="float16", report=reports.append),
        },
    )
    assert found["state"] == {"step": 7}
    assert found["ema"]["embed"].dtype == np.float16
    assert sorted(report.item for report in reports) == ["ema", "state"]
    with pytest.raises(InvalidArgumentError):
        ckpt.sync.load(tmp_path / "x", adapt={"emma": Adapt(cast="float16")})


def test_the_asyncio_manager_adapts_too(tmp_path: Path) -> None:
    async def main() -> Any:
        async with ckpt.CheckpointManager(tmp_path) as manager:
            await (await manager.save(3, model()))
            transforms = [stack("params.layers.*", to="params.layers")]
            adapt = Adapt(select="params.layers", transforms=transforms)
            with pytest.raises(TargetMismatchError) as caught:
                await manager.restore(3, like={}, adapt=adapt)
            assert caught.value.step == 3
            return await manager.restore(like={"params": {"layers": stacked()}}, adapt=adapt)

    same(asyncio.run(main()), {"params": {"layers": stacked()}})


def test_an_error_of_a_function_of_the_caller_is_not_swallowed(saved: Path) -> None:
    def fails(path: str) -> Any:
        raise ZeroDivisionError(path)

    for options in ({"select": fails}, {"rename": fails}, {"report": fails}):
        with pytest.raises((ZeroDivisionError, ckpt.errors.CheckpointError)) as caught:
            load(saved, **options)
        chain = (caught.value, caught.value.__cause__)
        assert any(isinstance(each, ZeroDivisionError) for each in chain)


# -- memory ---------------------------------------------------------------------------------------


def test_arrays_larger_than_the_staging_budget_are_stacked_and_cut(tmp_path: Path) -> None:
    staging = ckpt.Staging(budget_bytes=1 << 20)
    arrays = [counted(1024, 512, start=n << 19) for n in range(4)]
    ckpt.sync.save(tmp_path / "x", {"layers": arrays}, staging=staging)
    placed = NamedSharding(mesh(2, 4), P(None, "model", "data"))
    like = {"layers": jax.ShapeDtypeStruct((4, 1024, 512), jnp.float32, sharding=placed)}
    transforms = [stack("layers.*", to="layers")]
    with ckpt.sync.CheckpointManager(tmp_path / "root", staging=staging) as manager:
        manager.save(0, {"layers": arrays})
        manager.wait_until_finished()
        found = manager.restore(0, like=like, adapt=Adapt(transforms=transforms))
        assert bits(found["layers"]) == np.stack(arrays).tobytes()
        cut = {"layers": [np.empty((700, 600), np.float32)] * 4}
        found = manager.restore(0, like=cut, adapt=Adapt(resize="both"))
    for array, whole in zip(found["layers"], arrays, strict=True):
        same(array, resized(whole, (700, 600)))


def peak_kib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    raise AssertionError("no peak is known")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is Linux's")
def test_a_stack_takes_little_more_memory_than_itself(tmp_path: Path) -> None:
    staging = ckpt.Staging(budget_bytes=4 << 20)
    transforms = [stack("layers.*", to="layers", axis=1)]
    with ckpt.sync.CheckpointManager(tmp_path, staging=staging) as manager:
        arrays = [counted(2048, 2048, start=n) for n in range(8)]
        manager.save(0, {"layers": arrays})
        manager.wait_until_finished()
        nbytes = sum(array.nbytes for array in arrays)
        del arrays
        Path("/proc/self/clear_refs").write_text("5")
        before = peak_kib()
        found = manager.restore(0, adapt=Adapt(transforms=transforms))
        taken = (peak_kib() - before) << 10
    assert found["layers"].nbytes == nbytes
    assert taken < 1.4 * nbytes
    assert (found["layers"][:, 5, 0] == np.arange(2048, dtype=np.float32) * 2048 + 5).all()


SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@settings(max_examples=15)
@given(SHAPES, st.integers(1, 4), st.integers(-3, 3))
def test_to_stack_and_to_unstack_are_inverses(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, ...], count: int, axis: int
) -> None:
    place = axis % (len(shape) + 1)
    path = tmp_path_factory.mktemp("x") / "x"
    tree = {"a": [counted(*shape, start=100 * n) for n in range(count)]}
    ckpt.sync.save(path, tree)
    up, down = stack("a.*", to="b", axis=place), unstack("b", to="a.*", axis=place)
    same(load(path, zeros(tree), transforms=[up, down]), tree)


# -- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"select": 5},
        {"select": []},
        {"select": [5]},
        {"select": ""},
        {"select": {"params": "x"}},
        {"select": b"params"},
        {"rename": "params"},
        {"rename": 5},
        {"rename": {"params": 5}},
        {"rename": {"params": None}},
        {"rename": {5: "params"}},
        {"rename": {"layers.*": "layers"}},
        {"rename": {"layers": "layers.*"}},
        {"rename": {"**.layers": "*.layers"}},
        {"rename": {"": "params"}},
        {"transforms": 5},
        {"transforms": [5]},
        {"transforms": stack("a.*", to="a")},
        {"transforms": "stack"},
        {"cast": "nonsense"},
        {"cast": object},
        {"cast": {"params": None}},
        {"cast": {"params": "datetime64[s]"}},
        {"cast": {5: "float32"}},
        {"cast": ["float32"]},
        {"resize": "grow"},
        {"resize": True},
        {"resize": {"params": None}},
        {"resize": {5: "pad"}},
        {"resize": ["pad"]},
        {"missing": "ignore"},
        {"missing": None},
        {"extra": "keep"},
        {"extra": True},
        {"report": 5},
    ],
    ids=plain_id,
)
def test_an_option_that_cannot_be_meant_is_refused_before_anything_is_read(
    options: dict[str, Any],
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Adapt(**options)
    assert next(iter(options)) in str(caught.value)


def test_adapt_has_to_be_an_adapt(saved: Path) -> None:
    for wrong in ("params", {"select": "params"}, [Adapt()]):
        with pytest.raises(InvalidArgumentError):
            ckpt.sync.load(saved, adapt=wrong)  # type: ignore[arg-type]


# -- what a newcomer reads ------------------------------------------------------------------------


def golden(name: str, error: Exception) -> None:
    text = (GOLDEN / f"{name}.txt").read_text()
    assert f"{error}\n" == text


def test_the_message_of_a_target_that_differs_in_every_way(tmp_path: Path) -> None:
    tree = {**model(), "activation": jnp.tanh, "key": jax.random.key(0)}
    ckpt.sync.save(tmp_path / "x", tree)
    like = zeros(model())
    like["params"]["embed"] = np.zeros((6, 5), np.float32)
    like["params"]["layers"][0]["kernel"] = like["params"]["layers"][0].pop("w")
    like["params"]["layers"][1]["b"] = np.zeros(8, np.int32)
    like["opt"]["count"] = "nine"
    del like["opt"]["mu"]["embed"]
    like["opt"]["nu"] = jax.ShapeDtypeStruct((3,), jnp.float32)
    like["step"] = "seven"
    like["activation"] = 1.0
    like["key"] = jnp.zeros(2, jnp.uint32)
    with pytest.raises(TargetMismatchError) as caught:
        ckpt.sync.load(tmp_path / "x", like=like)
    golden("target", caught.value)


MESSAGES: dict[str, dict[str, Any]] = {
    "select": {"select": "param.layers"},
    "select_no_hint": {"select": "weights"},
    "rename_collision": {"rename": {"params": "opt.mu"}},
    "rename_covered": {"rename": {"params": "net", "params.embed": "head"}},
    "cast_dtype": {"cast": {"opt.count": "float64"}},
}


@pytest.mark.parametrize("name", MESSAGES)
def test_the_messages_of_options_that_do_not_fit(saved: Path, name: str) -> None:
    with pytest.raises(ckpt.errors.CheckpointError) as caught:
        load(saved, **MESSAGES[name])
    golden(name, caught.value)


def test_the_message_of_a_shape_that_may_not_be_reached(saved: Path) -> None:
    like = {"params": {"embed": np.zeros((8, 2), np.float32)}}
    with pytest.raises(TargetMismatchError) as caught:
        load(saved, like, select="params.embed", resize="pad")
    golden("resize", caught.value)


def test_the_message_of_a_function_without_a_target(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", {"activation": jax.nn.relu, "w": counted(2)})
    with pytest.raises(TargetMismatchError) as caught:
        ckpt.sync.load(tmp_path / "x")
    golden("function", caught.value)
    assert ckpt.sync.load(tmp_path / "x", adapt=Adapt(select="w"))["activation"] is ...
