"""Leaves of users' own types: packed while they are saved, objects again once restored."""

from __future__ import annotations

import logging
import numbers
import uuid
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orbax.checkpoint import v1 as ocp

import ckpt
import ckpt.sync
from ckpt import errors
from ckpt.handlers import LeafType, PackedLeaf, PyTreeHandler
from tests.support.simulated_job import FAR, closed, managers, saved, together


@dataclass(eq=False)
class Quantized:
    """Not registered with jax, so a leaf."""

    scale: float
    data: jax.Array

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Quantized)
            and self.scale == other.scale
            and bool(np.array_equal(self.data, other.data))
        )


class Finer(Quantized):
    pass


MONEY = LeafType(Decimal, pack=str, unpack=Decimal, name="decimal")
QUANTIZED = LeafType(
    Quantized,
    pack=lambda leaf: {"scale": leaf.scale, "data": leaf.data},
    unpack=lambda found: Quantized(found["scale"], found["data"]),
    name="quantized",
)
HANDLERS = [PyTreeHandler(leaf_types=[MONEY, QUANTIZED])]


def state(seed: int = 0) -> dict[str, Any]:
    return {
        "price": Decimal("1.10") + seed,
        "layers": [Quantized(0.5 + seed, jnp.arange(6) + seed), None, Quantized(0.25, jnp.ones(2))],
        "w": jnp.arange(4.0) + seed,
    }


def assert_same(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)  # type: ignore[operator]
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert type(one) is type(other) or isinstance(one, jax.Array)
        assert np.array_equal(one, other) if isinstance(one, jax.Array) else one == other


@pytest.mark.parametrize("fresh", [state, state()], ids=["function", "state"])
def test_a_run_saves_and_resumes_them(
    fresh: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for begin in (0, 3):
        with ckpt.sync.CheckpointManager(tmp_path, handlers=HANDLERS) as mgr:
            start, found = mgr.resume(fresh)
            assert start == begin
            assert_same(found, state(2) if begin else state())
            for step in range(start, start + 3):
                mgr.save(step, state(step))
    # Tracing the function would leave traced arrays in such leaves, so it is called.
    told = [each.getMessage() for each in caplog.records if "is called for a" in each.getMessage()]
    assert len(told) == (fresh is state)
    assert all("a leaf of type Quantized" in text for text in told)


def test_with_and_without_a_target(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "one", state(3), handlers=HANDLERS)
    assert_same(ckpt.sync.load(tmp_path / "one", handlers=HANDLERS), state(3))
    assert_same(ckpt.sync.load(tmp_path / "one", like=state(), handlers=HANDLERS), state(3))


def test_one_leaf_alone_is_a_state(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "one", Decimal("2.5"), handlers=HANDLERS)
    assert ckpt.sync.load(tmp_path / "one", handlers=HANDLERS) == Decimal("2.5")


def test_what_they_hold_is_an_array_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "one"
    ckpt.sync.save(path, state(3), handlers=HANDLERS)
    names = ckpt.sync.metadata(path).leaves["default"]
    assert "layers.0.data" in names
    assert "price" in names
    target = state()
    target["layers"][2].data = jax.ShapeDtypeStruct((2,), jnp.float16)
    found = ckpt.sync.load(path, like=target, handlers=HANDLERS)
    assert found["layers"][2].data.dtype == jnp.float16
    target["layers"][0].data = jax.ShapeDtypeStruct((6,), jnp.float32)
    with pytest.raises(errors.TargetMismatchError, match=r"layers\.0\.data: stored int32\[6\]"):
        ckpt.sync.load(path, like=target, handlers=HANDLERS)
    assert ocp.load(path)["layers"][0]["value"]["scale"] == 3.5
    assert ckpt.sync.verify(path).ok


def test_a_process_without_the_type_keeps_what_is_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt.sync.save(tmp_path / "one", state(3), handlers=HANDLERS)
    with caplog.at_level(logging.WARNING, "ckpt"):
        found = ckpt.sync.load(tmp_path / "one")
    assert found["price"] == PackedLeaf("decimal", "4.10")
    assert found["layers"][0].type_name == "quantized"
    (told,) = [each.getMessage() for each in caplog.records]
    assert "decimal, quantized" in told
    assert "LeafType" in told
    # Saved again by it, they are what they were.
    ckpt.sync.save(tmp_path / "two", found)
    assert_same(ckpt.sync.load(tmp_path / "two", handlers=HANDLERS), state(3))


def test_it_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ckpt.sync.CheckpointManager(tmp_path, handlers=HANDLERS) as mgr:
        mgr.save(1, state())
    with ckpt.sync.CheckpointManager(tmp_path, mode="r") as mgr:
        for _ in range(3):
            mgr.restore(1)
    assert len([each for each in caplog.records if "PackedLeaf" in each.getMessage()]) == 1


def test_subclasses_are_of_the_nearest_type(tmp_path: Path) -> None:
    finer = LeafType(Finer, lambda leaf: leaf.data, lambda found: Finer(9.0, found), name="finer")
    both = [PyTreeHandler(leaf_types=[QUANTIZED, finer])]
    tree = {"a": Finer(9.0, jnp.ones(2)), "b": Quantized(1.0, jnp.zeros(2))}
    ckpt.sync.save(tmp_path / "one", tree, handlers=both)
    found = ckpt.sync.load(tmp_path / "one", handlers=both)
    assert (type(found["a"]), type(found["b"])) == (Finer, Quantized)
    ckpt.sync.save(tmp_path / "two", tree, handlers=HANDLERS)
    found = ckpt.sync.load(tmp_path / "two", handlers=HANDLERS)
    assert (type(found["a"]), type(found["b"])) == (Quantized, Quantized)


def test_they_are_snapshots(tmp_path: Path) -> None:
    held = Quantized(1.0, jnp.ones(3))
    with ckpt.sync.CheckpointManager(tmp_path, handlers=HANDLERS) as mgr:
        commit = mgr.save(1, {"q": held})
        held.scale = 2.0
        held.data.delete()
        commit.result()
        assert mgr.restore(1)["q"] == Quantized(1.0, jnp.ones(3))


def test_the_processes_of_a_job_save_them_once(tmp_path: Path) -> None:
    mgrs = managers(tmp_path, seconds=FAR, handlers=HANDLERS)
    saved(mgrs, 1, {"price": Decimal("0.3"), "n": np.arange(4)})
    for found in together(*(mgr.restore for mgr in mgrs)):
        assert found["price"] == Decimal("0.3")
    closed(mgrs)


def fails(_: Any) -> Any:
    raise RuntimeError("out of ink")


@pytest.mark.parametrize(
    ("pack", "text"),
    [
        (fails, r"leaf 'a\.0'.*cannot be packed as 'decimal': RuntimeError: out of ink"),
        (lambda leaf: leaf, r"leaf 'a\.0'.*pack of 'decimal' returned Decimal"),
        (lambda _: {"b": [Decimal(2)]}, r"leaf 'a\.0'.*in which there are leaves of such types"),
        (lambda _: object(), r"leaf 'a\.0\.value'.*builtins\.object cannot be stored"),
    ],
)
def test_what_cannot_be_packed_is_named_and_nothing_is_left(
    pack: Any, text: str, tmp_path: Path
) -> None:
    broken = [PyTreeHandler(leaf_types=[LeafType(Decimal, pack, Decimal, name="decimal")])]
    with pytest.raises(errors.UnsupportedLeafError, match=text):
        ckpt.sync.save(tmp_path / "one", {"a": [Decimal(1)]}, handlers=broken)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_unpacked_is_named(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "one", {"a": [Decimal(1)]}, handlers=HANDLERS)
    broken = [PyTreeHandler(leaf_types=[LeafType(Decimal, str, fails, name="decimal")])]
    for like in (None, {"a": [Decimal(0)]}):
        with pytest.raises(
            errors.HandlerError, match=r"leaf 'a\.0': it cannot be unpacked as 'decimal'"
        ):
            ckpt.sync.load(tmp_path / "one", like=like, handlers=broken)


def test_a_leaf_that_cannot_be_unpacked_is_no_damage(tmp_path: Path) -> None:
    def unpack(text: str) -> Decimal:
        if text == "2":
            raise RuntimeError("the service for prices is down")
        return Decimal(text)

    busy = [PyTreeHandler(leaf_types=[LeafType(Decimal, str, unpack, name="decimal")])]
    with ckpt.sync.CheckpointManager(tmp_path, handlers=busy) as mgr:
        for step in (1, 2):
            mgr.save(step, {"a": Decimal(step)}, durable=True)
        with pytest.raises(errors.HandlerError, match=r"step 2.*prices is down"):
            mgr.restore(fallback=True)
        with pytest.raises(errors.StepExistsError):
            mgr.save(2, {"a": Decimal(3)}, durable=True)


def test_trees_that_cannot_be_walked_are_told_as_without_leaf_types(tmp_path: Path) -> None:
    endless: dict[str, Any] = {"a": Decimal(1)}
    endless["d"] = endless
    deep: Any = Decimal(1)
    for _ in range(5000):
        deep = [deep]
    unsorted = {1: Decimal(1), "a": 2}
    with ckpt.sync.CheckpointManager(tmp_path, handlers=HANDLERS) as mgr:
        for tree, text in (
            (endless, "contains itself"),
            (deep, "nested deeper"),
            (unsorted, "cannot be sorted"),
        ):
            with pytest.raises(errors.UnsupportedLeafError, match=text):
                mgr.save(1, {"tree": tree}, durable=True)
        mgr.save(1, state(), durable=True)
        with pytest.raises(errors.CheckpointError):
            mgr.restore(1, like=endless)


def test_what_is_left_out_is_not_unpacked(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "one", state(3), handlers=HANDLERS)
    load = ckpt.sync.load
    found = load(tmp_path / "one", adapt=ckpt.Adapt(select="w"), handlers=HANDLERS)
    assert found["price"] is ...
    assert found["layers"][0] is ...
    some = ckpt.Adapt(select="layers.*.data")
    half = load(tmp_path / "one", adapt=some, handlers=HANDLERS)["layers"][0]
    assert isinstance(half, PackedLeaf)
    assert np.array_equal(half.value["data"], state(3)["layers"][0].data)


def test_an_object_that_is_a_whole_item_is_packed(tmp_path: Path) -> None:
    items = {"one": Quantized(0.5, jnp.arange(3)), "two": {"a": 1}}
    ckpt.sync.save(tmp_path / "one", items=items, handlers=HANDLERS)
    assert ckpt.sync.load(tmp_path / "one", handlers=HANDLERS)["one"] == items["one"]


def test_an_abstract_class_stands_for_what_is_registered_with_it(tmp_path: Path) -> None:
    numbers_type = LeafType(numbers.Number, pack=str, unpack=Decimal, name="number")
    handlers = [PyTreeHandler(leaf_types=[numbers_type])]
    ckpt.sync.save(tmp_path / "one", {"a": Decimal("1.5"), "b": 3, "c": 2.5}, handlers=handlers)
    found = ckpt.sync.load(tmp_path / "one", handlers=handlers)
    assert found == {"a": Decimal("1.5"), "b": 3, "c": 2.5}


class Called(Quantized):
    def __call__(self) -> None: ...


def test_a_callable_object_may_hold_arrays_too(tmp_path: Path) -> None:
    def init() -> dict[str, Any]:
        return {"q": Called(0.5, jnp.arange(4) * 2.0)}

    for begin in (0, 1):
        with ckpt.sync.CheckpointManager(tmp_path, handlers=HANDLERS) as mgr:
            start, found = mgr.resume(init)
            assert start == begin
            assert np.array_equal(found["q"].data, [0, 2, 4, 6])
            mgr.save(start, found)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LeafType("Decimal", str, Decimal),  # type: ignore[arg-type]
        lambda: LeafType(np.ndarray, str, Decimal),
        lambda: LeafType(dict, str, Decimal),
        lambda: LeafType(bool, str, Decimal),
        lambda: LeafType(object, str, Decimal),
        lambda: LeafType(Decimal, "str", Decimal),  # type: ignore[arg-type]
        lambda: LeafType(Decimal, str, None),  # type: ignore[arg-type]
        lambda: LeafType(Decimal, str, Decimal, name="a\nb"),
        lambda: PyTreeHandler(leaf_types=[Decimal]),  # type: ignore[list-item]
        lambda: PyTreeHandler(leaf_types=MONEY),  # type: ignore[arg-type]
        lambda: PyTreeHandler(leaf_types=None),  # type: ignore[arg-type]
        lambda: PyTreeHandler(leaf_types=[MONEY, MONEY]),
        lambda: PyTreeHandler(leaf_types=[MONEY, LeafType(Finer, str, Finer, "decimal")]),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_refused(make: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=r"LeafType|leaf_types"):
        make()


def test_an_unsupported_leaf_is_told_of_the_way(tmp_path: Path) -> None:
    with pytest.raises(errors.UnsupportedLeafError, match=r"leaf 'price'.*LeafType"):
        ckpt.sync.save(tmp_path / "one", {"price": Decimal(1)})


leaves = (
    st.decimals(allow_nan=False)
    | st.integers(-5, 5)
    | st.text("ab", max_size=3)
    | st.builds(Quantized, st.floats(-1, 1), st.integers(1, 4).map(jnp.arange))
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(trees)
def test_any_tree_comes_back(tree: Any) -> None:
    path = f"memory://leaf-types/{uuid.uuid4().hex}"
    ckpt.sync.save(path, {"tree": tree}, handlers=HANDLERS)
    found = ckpt.sync.load(path, handlers=HANDLERS)["tree"]
    assert_same(found, tree)
    again = ckpt.sync.load(path, like={"tree": tree}, handlers=HANDLERS)["tree"]
    assert_same(again, tree)


def test_items_of_other_kinds_keep_their_handlers(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    items = {"model": state(), "notes": "text", "random": generator}
    ckpt.sync.save(tmp_path / "one", items=items, handlers=HANDLERS)
    found = ckpt.sync.load(tmp_path / "one", handlers=HANDLERS)
    assert_same(found["model"], state())
    assert found["notes"] == "text"
    assert found["random"].integers(1 << 30) == generator.integers(1 << 30)
