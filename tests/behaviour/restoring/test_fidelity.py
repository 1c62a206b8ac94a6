"""What a tree is beyond its numbers: keys, shared arrays, weak types, functions, long names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import ckpt
import ckpt.sync
from ckpt.errors import TargetMismatchError, UnsupportedLeafError
from ckpt.testing.compare import differences
from tests.support.trees import P, mesh

IMPLS = ["threefry2x32", "rbg", "unsafe_rbg"]
SHAPES: list[tuple[int, ...]] = [(), (3,), (2, 0), (8, 2)]


def keys(impl: str, shape: tuple[int, ...]) -> jax.Array:
    key = jax.random.key(42, impl=impl)
    return jax.random.split(key, shape) if shape else key


def written(path: Path) -> int:
    """Bytes of all data files below `path`."""
    return sum(file.stat().st_size for file in path.rglob("d/*") if file.is_file())


def abstract(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


# -- PRNG keys ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_typed_keys_come_back(tmp_path: Path, impl: str, shape: tuple[int, ...]) -> None:
    tree = {"rng": keys(impl, shape), "w": jnp.ones(2)}
    ckpt.sync.save(tmp_path / "x", tree)
    for like in (None, tree, jax.tree.map(abstract, tree)):
        found = ckpt.sync.load(tmp_path / "x", like=like)
        assert differences(tree, found) == []
        assert jax.random.key_impl(found["rng"]) == impl
        assert not found["rng"].committed
    if shape == ():
        assert float(jax.random.normal(found["rng"])) == float(jax.random.normal(tree["rng"]))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "spec", [P("data"), P(("data", "model")), P("data", "model"), P()], ids=str
)
def test_keys_on_many_devices_come_back_where_they_were(tmp_path: Path, impl: str, spec: P) -> None:
    placed = jax.device_put(keys(impl, (8, 4)), NamedSharding(mesh(2, 4), spec))
    ckpt.sync.save(tmp_path / "x", placed)
    found: Any
    for like in (None, placed, abstract(placed)):
        found = ckpt.sync.load(tmp_path / "x", like=like)
        assert differences(placed, found) == []
    # And elsewhere, if the target says so.
    other = NamedSharding(mesh(4, 2), P(None, "data"))
    like = jax.ShapeDtypeStruct((8, 4), placed.dtype, sharding=other)
    found = ckpt.sync.load(tmp_path / "x", like=like)
    assert found.sharding == other
    np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(placed))


OTHERS: dict[str, Callable[[], Any]] = {
    "another implementation": lambda: keys("rbg", (3,)),
    "an abstract key of another": lambda: abstract(keys("unsafe_rbg", (3,))),
    "more keys": lambda: keys("threefry2x32", (4,)),
    "one key": lambda: keys("threefry2x32", ()),
    "raw data": lambda: jnp.zeros((3, 2), jnp.uint32),
    "an abstract raw key": lambda: jax.ShapeDtypeStruct((3, 2), jnp.uint32),
    "raw numpy data": lambda: np.zeros((3, 2), np.uint32),
    "a number": lambda: 5,
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_key_is_no_other_key_and_no_array(tmp_path: Path, name: str) -> None:
    ckpt.sync.save(tmp_path / "x", {"rng": keys("threefry2x32", (3,))})
    with pytest.raises(TargetMismatchError) as caught:
        ckpt.sync.load(tmp_path / "x", like={"rng": OTHERS[name]()})
    (line,) = caught.value.problems
    assert line.startswith("rng: stored PRNG key threefry2x32[3], wanted ")
    assert "no implementation" not in line


def test_raw_data_is_no_key(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", {"rng": jax.random.key_data(keys("threefry2x32", (3,)))})
    with pytest.raises(TargetMismatchError, match="rng: stored uint32"):
        ckpt.sync.load(tmp_path / "x", like={"rng": keys("threefry2x32", (3,))})


# -- shared leaves --------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [50, 512], ids=["packed", "in chunks"])
@pytest.mark.parametrize("kind", ["jax", "numpy", "key"])
def test_one_array_at_many_places_is_stored_once_and_comes_back_as_one(
    tmp_path: Path, kind: str, side: int
) -> None:
    makers: dict[str, Callable[[int], Any]] = {
        "jax": lambda start: jnp.arange(start, start + side * side, dtype=jnp.float32),
        "numpy": lambda start: np.arange(start, start + side * side, dtype=np.float32),
        "key": lambda start: jax.random.split(jax.random.key(start), side * side),
    }
    shared, other = makers[kind](0), makers[kind](1)
    tree = {"embed": shared, "head": [shared, {"tied": shared}], "other": other}
    info = ckpt.sync.save(tmp_path / "x", tree)
    two = ckpt.sync.save(tmp_path / "two", {"embed": shared, "other": other})
    assert info.nbytes == two.nbytes
    # A place in the index is all that another path takes.
    assert written(tmp_path / "x") - written(tmp_path / "two") < 1000
    found = ckpt.sync.load(tmp_path / "x")
    assert differences(tree, found, shared=True) == []
    assert found["embed"] is found["head"][0] is found["head"][1]["tied"]
    assert found["embed"] is not found["other"]


@pytest.mark.parametrize("side", [8, 512], ids=["packed", "in chunks"])
def test_shared_arrays_come_back_as_the_target_has_them(tmp_path: Path, side: int) -> None:
    shared = jnp.arange(side * side, dtype=jnp.float32)
    ckpt.sync.save(tmp_path / "x", {"a": shared, "b": shared, "c": shared})
    one = jnp.zeros_like(shared)
    like = {"a": one, "b": one, "c": np.zeros(side * side, np.float64)}
    found: Any = ckpt.sync.load(tmp_path / "x", like=like)
    assert found["a"] is found["b"]
    assert type(found["c"]) is np.ndarray
    for array in found.values():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(shared, array.dtype))
    apart = {name: jax.device_put(one, jax.devices()[n + 1]) for n, name in enumerate("abc")}
    found = ckpt.sync.load(tmp_path / "x", like=apart)
    assert len(set(map(id, found.values()))) == 3
    assert (
        differences(jax.tree.map(lambda x: jax.device_put(shared, x.sharding), apart), found) == []
    )
    # Only one place of it, and none of the others.
    (only,) = jax.tree.leaves(ckpt.sync.load(tmp_path / "x", adapt=ckpt.Adapt(select="b"))["b"])
    np.testing.assert_array_equal(only, shared)


def test_equal_arrays_that_are_not_one_do_not_become_one(tmp_path: Path) -> None:
    tree = {"a": np.zeros(4), "b": np.zeros(4)}
    ckpt.sync.save(tmp_path / "x", tree)
    found = ckpt.sync.load(tmp_path / "x", like={"a": tree["a"], "b": tree["a"]})
    found["a"][0] = 1
    assert found["b"][0] == 0
    # Nor do numpy arrays that a target asks for become one, which could be changed through another.
    ckpt.sync.save(tmp_path / "y", {"a": tree["a"], "b": tree["a"]})
    found = ckpt.sync.load(tmp_path / "y", like={"a": tree["a"], "b": tree["a"]})
    assert found["a"] is not found["b"]
    found = ckpt.sync.load(tmp_path / "x")
    assert found["a"] is not found["b"]


def test_shared_arrays_can_be_stacked_with_themselves(tmp_path: Path) -> None:
    shared = np.arange(6.0).reshape(2, 3)
    ckpt.sync.save(tmp_path / "x", {"layers": [shared, shared, shared + 1]})
    adapt = ckpt.Adapt(transforms=[ckpt.surgery.stack("layers.*", to="layers")])
    found = ckpt.sync.load(tmp_path / "x", adapt=adapt)
    np.testing.assert_array_equal(found["layers"], np.stack([shared, shared, shared + 1]))


# -- weak types -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1.5, 3, 1 + 2j, float("nan"), -0.0])
@pytest.mark.parametrize("shape", [(), (3,), (0,)], ids=str)
def test_a_weak_type_comes_back(tmp_path: Path, value: Any, shape: tuple[int, ...]) -> None:
    weak, strong = jnp.full(shape, value), jnp.full(shape, value, jnp.asarray(value).dtype)
    placed = jax.device_put(weak, jax.devices()[3])
    assert weak.weak_type
    assert placed.weak_type
    assert not strong.weak_type
    tree = {"placed": placed, "strong": strong, "weak": weak}
    ckpt.sync.save(tmp_path / "x", tree)
    for like in (None, tree):
        assert differences(tree, ckpt.sync.load(tmp_path / "x", like=like)) == []
    swapped = {"weak": strong, "strong": weak, "placed": weak}
    found = ckpt.sync.load(tmp_path / "x", like=swapped)
    assert [found[name].weak_type for name in ("weak", "strong", "placed")] == [False, True, True]


def test_a_restored_state_does_not_compile_the_step_again(tmp_path: Path) -> None:
    @jax.jit
    def step(state: Any) -> Any:
        return {"w": state["w"] * state["rate"], "rate": state["rate"], "n": state["n"] + 1}

    state = step({"w": jnp.ones(3), "rate": jnp.asarray(0.5), "n": jnp.asarray(0)})
    state = step(state)
    compiled = step._cache_size()  # type: ignore[attr-defined]
    ckpt.sync.save(tmp_path / "x", state)
    for like in (None, state):
        step(ckpt.sync.load(tmp_path / "x", like=like))
    assert step._cache_size() == compiled  # type: ignore[attr-defined]


# -- functions ------------------------------------------------------------------------------------


def test_functions_are_kept_from_the_target(tmp_path: Path) -> None:
    tree = {"act": jax.nn.gelu, "norm": jax.jit(jnp.sin), "w": jnp.ones(2)}
    ckpt.sync.save(tmp_path / "x", tree)
    like = {"act": jax.nn.relu, "norm": np.exp, "w": jnp.zeros(2)}
    found = ckpt.sync.load(tmp_path / "x", like=like)
    assert found["act"] is jax.nn.relu
    assert found["norm"] is np.exp
    np.testing.assert_array_equal(found["w"], [1, 1])
    # Nor is a function missed that either side does not have.
    assert set(ckpt.sync.load(tmp_path / "x", like={"w": jnp.zeros(2)})) == {"w"}
    more = {**like, "more": len}
    assert ckpt.sync.load(tmp_path / "x", like=more)["more"] is len
    for wrong in ({**like, "act": 5}, {**like, "w": len}):
        with pytest.raises(TargetMismatchError, match="function"):
            ckpt.sync.load(tmp_path / "x", like=wrong)


def test_functions_without_a_target_are_an_error_that_names_them(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", {"act": jax.nn.gelu, "w": jnp.ones(2), "norm": len})
    with pytest.raises(TargetMismatchError, match="like=") as caught:
        ckpt.sync.load(tmp_path / "x")
    assert [line.split(":")[0] for line in caught.value.problems] == ["act", "norm"]


def test_what_holds_more_than_code_is_refused(tmp_path: Path) -> None:
    kept: list[int] = []
    empty: dict[str, int] = {}
    for leaf in (kept.append, empty.get, "a".join, tmp_path.exists, int):
        with pytest.raises(UnsupportedLeafError):
            ckpt.sync.save(tmp_path / "x", {"f": leaf, "w": jnp.ones(2)})


# -- names and roots ------------------------------------------------------------------------------


def test_dict_keys_of_any_length_come_back(tmp_path: Path) -> None:
    texts = ["x" * 10_000, "x" * 10_000 + "y", "." * 1000, "%" * 600, "\u4e2d" * 700, "a" * 513]
    tree: dict[str, Any] = {text: np.full(3, n) for n, text in enumerate(texts)}
    tree |= {"deep": {texts[0]: {texts[1]: {"leaf": jnp.ones(2)}}}}
    ckpt.sync.save(tmp_path / "x", tree)
    assert differences(tree, ckpt.sync.load(tmp_path / "x")) == []
    like = jax.tree.map(lambda leaf: leaf * 0, tree)
    found = ckpt.sync.load(tmp_path / "x", like=like)
    assert differences(jax.tree.map(lambda leaf: leaf, tree), found) == []
    numbers = {10**700: np.ones(1), 10**700 + 1: np.zeros(1)}
    ckpt.sync.save(tmp_path / "y", numbers)
    assert differences(numbers, ckpt.sync.load(tmp_path / "y")) == []


@pytest.mark.parametrize(
    "tree",
    [np.arange(3), np.float32(1), 5, 2.5, {}, [], (), OrderedDict(), {"a": {}}, [None]],
    ids=repr,
)
def test_a_root_of_any_kind_comes_back(tmp_path: Path, tree: Any) -> None:
    ckpt.sync.save(tmp_path / "x", tree)
    assert differences(tree, ckpt.sync.load(tmp_path / "x")) == []
    assert differences(tree, ckpt.sync.load(tmp_path / "x", like=tree)) == []
    assert ckpt.sync.load(tmp_path / "x", like=...) is ...


def test_a_root_key_and_a_root_array_on_many_devices_come_back(tmp_path: Path) -> None:
    placed = jax.device_put(jnp.arange(8.0), NamedSharding(mesh(), P("data")))
    for number, root in enumerate((jax.random.key(3), placed)):
        ckpt.sync.save(tmp_path / str(number), root)
        for like in (None, root):
            found = ckpt.sync.load(tmp_path / str(number), like=like)
            assert differences(root, found) == []


def test_a_set_in_a_key_is_refused_since_it_has_no_order(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLeafError, match="order"):
        ckpt.sync.save(tmp_path / "x", {frozenset("ab"): np.ones(1)})


# -- integers -------------------------------------------------------------------------------------

LARGE: dict[str, tuple[Any, str, str]] = {
    "beyond int32": (np.array([3_000_000_000, 1], np.int64), "int32", "3000000000"),
    "negative": (np.array([-1], np.int32), "uint32", "-1"),
    "not packed": (np.arange(200_000, dtype=np.int64), "int16", "199999"),
    "narrower than a byte": (np.array([100], np.int8), "int4", "100"),
    "beyond int64": (np.array([2**63], np.uint64), "int64", "9223372036854775808"),
}


@pytest.mark.parametrize("kind", LARGE)
def test_integers_that_do_not_fit_the_target_are_refused_by_leaf(tmp_path: Path, kind: str) -> None:
    array, dtype, value = LARGE[kind]
    ckpt.sync.save(tmp_path / "x", {"ok": jnp.ones(2), "tokens": array})
    like = {"ok": ..., "tokens": np.zeros(array.shape, jnp.dtype(dtype))}
    with pytest.raises(TargetMismatchError, match=value) as caught:
        ckpt.sync.load(tmp_path / "x", like=like)
    assert caught.value.leaf == "tokens"


@pytest.mark.parametrize("shape", [(16,), (8, 40_000)])
def test_integers_that_fit_come_back_narrower(tmp_path: Path, shape: tuple[int, ...]) -> None:
    array = np.full(shape, 100, np.int64)
    ckpt.sync.save(tmp_path / "x", {"tokens": array})
    rows = NamedSharding(mesh(), P("data"))
    for like in (
        np.zeros(shape, np.int8),
        jax.ShapeDtypeStruct(shape, jnp.uint8, sharding=rows),
    ):
        found: Any = ckpt.sync.load(tmp_path / "x", like={"tokens": like})["tokens"]
        assert found.dtype == like.dtype
        assert np.array_equal(found, array)


def test_a_cast_of_what_is_no_integer_value_is_refused(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", {"a": np.array([1.0, np.nan], np.float32)})
    with pytest.raises(TargetMismatchError, match="nan"):
        ckpt.sync.load(tmp_path / "x", adapt=ckpt.Adapt(cast={"a": "int8"}))


# -- Python scalars and arrays without dimensions -------------------------------------------------

COUNTS: dict[str, tuple[Any, Any]] = {
    "int": (7, jnp.int32(7)),
    "negative int": (-7, np.int8(-7)),
    "large int": (2**63, np.uint64(2**63)),
    "float": (0.5, jnp.bfloat16(0.5)),
    "bool": (True, np.bool_(True)),
    "complex": (1 + 2j, jnp.complex64(1 + 2j)),
    "replicated": (7, jax.device_put(jnp.int32(7), NamedSharding(mesh(), P()))),
    "numpy array": (7, np.array(7, np.int16)),
}


@pytest.mark.parametrize("kind", COUNTS)
def test_a_scalar_and_an_array_without_dimensions_stand_for_each_other(
    tmp_path: Path, kind: str
) -> None:
    scalar, array = COUNTS[kind]
    ckpt.sync.save(tmp_path / "scalar", {"step": scalar, "w": jnp.ones(2)})
    ckpt.sync.save(tmp_path / "array", {"step": array, "w": jnp.ones(2)})
    rest = {"w": jnp.zeros(2)}
    found = ckpt.sync.load(tmp_path / "scalar", like={"step": array, **rest})["step"]
    assert type(found) is type(array)
    assert (found.dtype, found.shape) == (array.dtype, ())
    assert found == array
    if isinstance(array, jax.Array):
        assert found.sharding == array.sharding
        assert found.committed == array.committed
    for like in (scalar, type(scalar)):
        back = ckpt.sync.load(tmp_path / "array", like={"step": like, **rest})["step"]
        assert type(back) is type(scalar)
        assert back == scalar


def test_a_scalar_comes_back_onto_the_sharding_of_an_abstract_target(tmp_path: Path) -> None:
    everywhere = NamedSharding(mesh(), P())
    ckpt.sync.save(tmp_path / "x", {"step": 3})
    like = {"step": jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)}
    found = ckpt.sync.load(tmp_path / "x", like=like)["step"]
    assert (found == 3, found.sharding) == (True, everywhere)


def test_a_type_asks_for_a_numpy_text(tmp_path: Path) -> None:
    state = {"raw": np.bytes_(b"y"), "text": np.str_("x")}
    ckpt.sync.save(tmp_path / "x", state)
    found = ckpt.sync.load(tmp_path / "x", like={"text": np.str_, "raw": np.bytes_})
    assert differences(state, found) == []
    with pytest.raises(TargetMismatchError) as caught:
        ckpt.sync.load(tmp_path / "x", like={"text": str, "raw": np.bytes_})
    assert [line.split(":")[0] for line in caught.value.problems] == ["text"]


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (300, np.int8(0)),
        (-1, np.uint8(0)),
        (2**40, jnp.int32(0)),
        (3, np.float32(0)),
        (True, np.int32(0)),
        (0.5, np.int32(0)),
        (1e300, np.float32(0)),
        (np.float32(3), np.float32),
        (3, np.zeros(1, np.int32)),
        ("3", np.int32(0)),
        (np.int32(3), 0.0),
        (np.float32(3), 0),
        (np.bool_(True), 0),
        (np.zeros(1, np.int32), 0),
        (jax.random.key(0), 0),
    ],
    ids=repr,
)
def test_a_scalar_of_another_kind_or_one_that_would_lose_its_value_is_a_difference(
    tmp_path: Path, stored: Any, wanted: Any
) -> None:
    ckpt.sync.save(tmp_path / "x", {"step": stored})
    with pytest.raises(TargetMismatchError) as caught:
        ckpt.sync.load(tmp_path / "x", like={"step": wanted})
    assert [line.split(":")[0] for line in caught.value.problems] == ["step"]
