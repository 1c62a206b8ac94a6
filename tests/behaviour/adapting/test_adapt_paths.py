"""`ckpt.Adapt` selects and renames leaves, and keeps values that are not stored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt import Adapt
from ckpt.errors import InvalidArgumentError, TargetMismatchError
from ckpt.surgery import stack
from tests.behaviour.adapting.adapted_state import counted, load, model, resized, same, zeros
from tests.support.trees import structure

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
    assert structure(found) == structure(target)
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


def test_a_slash_in_a_key_is_written_as_it_is(tmp_path: Path) -> None:
    tree = {"params": {f"mlp/~/linear_{n}": {"w": counted(3, start=n)} for n in range(2)}}
    ckpt.sync.save(tmp_path / "x", tree)
    one = {"w": counted(3, start=1)}
    same(ckpt.sync.load(tmp_path / "x", at="params.mlp/~/linear_1"), one)
    same(load(tmp_path / "x", select="params.mlp/~/*")["params"], tree["params"])
    wanted = {f"head/~/linear_{n}": {"w": counted(3, start=n)} for n in range(2)}
    for like in (None, zeros(wanted)):
        rename = {"params.mlp/~/linear_*": "head/~/linear_*"}
        same(load(tmp_path / "x", like, rename=rename), wanted)
    same(ckpt.sync.open_array(tmp_path / "x", "params.mlp/~/linear_1.w")[:], one["w"])


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


SHAPE = jax.ShapeDtypeStruct((2,), jnp.float32)


@pytest.mark.parametrize("wanted", [SHAPE, int, ..., 4, "text", np.ones(2), None])
def test_a_leaf_that_is_not_stored_stays_what_it_is(saved: Path, wanted: Any) -> None:
    """Also in a target of shapes, which has no value for it; the report names it."""
    reports: list[ckpt.types.RestoreReport] = []
    like = {**ckpt.abstract(zeros(model())), "adapter": {"a": wanted}}
    found = load(saved, like, missing="keep", report=reports.append)
    assert found["adapter"]["a"] is wanted
    same({name: found[name] for name in model()}, model())
    assert reports[0].kept == (() if wanted is None else ("adapter.a",))


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


def stacked() -> dict[str, Any]:
    layers = model()["params"]["layers"]
    return {name: np.stack([layer[name] for layer in layers]) for name in ("w", "b")}


# -- all together ---------------------------------------------------------------------------------


def test_selected_renamed_stacked_cast_and_resized_in_one_go(saved: Path) -> None:
    reports: list[ckpt.types.RestoreReport] = []
    wanted: dict[str, Any] = {
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
    assert report.item == "default"


def test_a_report_tells_used_unused_and_kept_apart(saved: Path) -> None:
    reports: list[ckpt.types.RestoreReport] = []
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
    reports: list[ckpt.types.RestoreReport] = []
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
