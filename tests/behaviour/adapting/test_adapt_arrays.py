"""`ckpt.Adapt` casts, resizes, stacks, splits and concatenates arrays."""

from __future__ import annotations

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
from ckpt.errors import TargetMismatchError
from ckpt.surgery import concatenate, split, stack, unstack
from tests.behaviour.adapting.adapted_state import counted, load, model, resized, same, zeros
from tests.support.trees import P, bits, mesh, sharded

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
        found: Any = manager.restore(0, like=like, adapt=Adapt(transforms=transforms))
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
