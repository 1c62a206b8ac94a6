"""What a leaf is, and Python scalars as text: exact for every value."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt._format.array_format import DTYPES, parse_dtype
from ckpt._format.leaf_table import LeafEntry, LeafTable
from ckpt._format.manifest import ItemEntry, decode_item, encode_item
from ckpt._tree.leaf_kinds import CALLABLE, SCALAR_KINDS, decode_scalar, encode_scalar, scalar_array
from ckpt._tree.leaf_specs import classify
from ckpt.errors import CorruptCheckpointError, UnsupportedLeafError
from ckpt.testing.compare import differences
from ckpt.testing.strategies import arrays, leaves, numpy_scalars, python_scalars

JSON = st.one_of(st.booleans(), st.text(max_size=12), st.none())


def entry(kind: str, value: Any) -> LeafEntry:
    """An entry that was in a file."""
    stored = LeafTable.of([LeafEntry(name="x", kind=kind, value=value)])
    item = ItemEntry(handler="pytree", leaves=stored)
    return decode_item(encode_item(item)).leaves[0]


@given(st.one_of(python_scalars(), st.integers(-(2**66), 2**66)))
def test_a_scalar_comes_back_exactly(value: Any) -> None:
    kind = classify(value, "x").kind
    assert kind == type(value).__name__
    found = decode_scalar(entry(kind, encode_scalar(kind, value)))
    assert differences(value, found) == []


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("bits", [63, 64, 65, 10_000, 1_000_000])
def test_an_int_of_any_size_comes_back(bits: int, sign: int) -> None:
    for value in (sign * (1 << bits) - 1, sign * (1 << bits), sign * (1 << bits) + 1):
        assert decode_scalar(entry("int", encode_scalar("int", value))) == value


@given(st.sampled_from([*sorted(SCALAR_KINDS), "jax", "tuple", ""]), JSON)
def test_a_value_that_is_not_of_its_kind_is_corruption(kind: str, value: Any) -> None:
    try:
        found = decode_scalar(entry(kind, value))
    except CorruptCheckpointError:
        return
    assert type(found) is SCALAR_TYPES[kind]


SCALAR_TYPES = {
    **{kind.__name__: kind for kind in (bool, int, float, complex, str, bytes)},
    "numpy_str": np.str_,
    "numpy_bytes": np.bytes_,
}


@given(st.one_of(st.text(), st.binary()))
def test_numpy_text_and_bytes_come_back_as_what_they_were(value: Any) -> None:
    scalar = np.str_(value) if isinstance(value, str) else np.bytes_(value)
    kind = classify(scalar, "x").kind
    found = decode_scalar(entry(kind, encode_scalar(kind, scalar)))
    assert type(found) is type(scalar)
    assert found == scalar


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_a_typed_key_is_the_array_of_its_data(impl: str) -> None:
    keys = jax.random.split(jax.random.key(0, impl=impl), (2, 3))
    spec, data = classify(keys, "x"), jax.random.key_data(keys)
    assert (spec.kind, spec.impl) == ("key", impl)
    assert (spec.dtype, spec.shape) == ("uint32", data.shape)


@pytest.mark.parametrize(
    "function",
    [print, len, lambda x: x, jax.nn.relu, jax.jit(jnp.sin), np.add, functools.partial(max, 0)],
)
def test_a_function_is_a_leaf_without_a_value(function: Any) -> None:
    assert classify(function, "x").kind == CALLABLE


@given(python_scalars())
def test_other_readers_find_a_scalar_as_an_array_of_its_value(value: Any) -> None:
    array = scalar_array(type(value).__name__, value)
    if array is not None:
        assert array.shape == ()
        assert differences(value, array.item()) == []
    else:
        assert isinstance(value, str | bytes | complex) or abs(value) >= 2**63


@given(leaves())
def test_leaves_can_be_classified(leaf: Any) -> None:
    spec = classify(leaf, "x")
    assert spec.sharding is None
    if isinstance(leaf, np.ndarray | np.generic):
        assert spec.kind == ("numpy" if isinstance(leaf, np.ndarray) else "numpy_scalar")
        assert spec.shape == leaf.shape
        assert spec.nbytes == leaf.nbytes
        assert parse_dtype(spec.dtype) == leaf.dtype
    else:
        array = scalar_array(spec.kind, leaf)
        assert spec.kind == type(leaf).__name__
        assert spec.dtype == (None if array is None else array.dtype.name)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_has_the_name_numpy_gives_it(name: str) -> None:
    assert parse_dtype(name).name == name
    assert classify(np.zeros(2, parse_dtype(name)), "x").dtype == name


def test_every_dtype_that_training_uses_can_be_stored() -> None:
    widths = [f"{sign}int{bits}" for sign in ("", "u") for bits in (2, 4, 8, 16, 32, 64)]
    floats = [name for name in vars(ml_dtypes) if name.startswith(("bfloat16", "float8_"))]
    others = ["bool_", "float16", "float32", "float64", "complex64", "complex128", "float4_e2m1fn"]
    for name in [*widths, *floats, *others]:
        assert jnp.dtype(getattr(jnp, name)).name in DTYPES


@given(st.one_of(st.text(max_size=12), st.sampled_from(["object", "V8", "M8[ns]", ">f4", "O"])))
def test_only_dtypes_of_a_closed_list_are_parsed(name: str) -> None:
    if name not in DTYPES:
        with pytest.raises(CorruptCheckpointError):
            parse_dtype(name)


def jax_array() -> jax.Array:
    return jax.device_put(np.arange(6, dtype=np.float32).reshape(2, 3), jax.devices()[2])


def test_a_jax_array_is_known_by_its_placement() -> None:
    array = jax_array()
    spec = classify(array, "x")
    assert (spec.kind, spec.dtype, spec.shape) == ("jax", "float32", (2, 3))
    assert spec.sharding == array.sharding
    assert spec.committed
    assert not spec.weak_type
    free = classify(jnp.asarray(1.0), "x")
    assert free.weak_type
    assert not free.committed


class Callable_:
    """May hold anything, so it must not be taken for a mere function."""

    def __call__(self) -> None: ...


def deleted() -> jax.Array:
    array = jax_array()
    array.delete()
    return array


@pytest.mark.parametrize(
    "make",
    [
        deleted,
        lambda: np.zeros(2, ">f4"),
        lambda: np.zeros(2, object),
        lambda: np.zeros(2, "datetime64[s]"),
        lambda: np.zeros(2, "S3"),
        lambda: np.zeros(2, [("a", "f4")]),
        lambda: np.ma.masked_array([1.0]),
        lambda: "\ud800",
        lambda: np.str_("\ud800"),
        lambda: functools.partial(print, object()),
        lambda: [].append,
        lambda: Callable_(),
        object,
        lambda: {1, 2},
        lambda: jax.ShapeDtypeStruct((2,), jnp.float32),
        lambda: ...,
        lambda: int,
    ],
)
def test_a_leaf_that_cannot_be_stored_is_refused_by_its_path(make: Callable[[], Any]) -> None:
    leaf = make()
    with pytest.raises(UnsupportedLeafError) as caught:
        classify(leaf, "params.w")
    assert caught.value.leaf == "params.w"


@pytest.mark.parametrize("names", [("get_state", "set_state"), ("state_dict", "load_state_dict")])
def test_an_object_with_a_state_among_the_leaves_is_sent_to_the_items(names: list[str]) -> None:
    iterator = type("Iterator", (), dict.fromkeys(names, lambda *_: {}))()
    with pytest.raises(UnsupportedLeafError, match=r"has a state: save it beside the tree, items="):
        classify(iterator, "state.data")
    with pytest.raises(UnsupportedLeafError) as caught:
        classify(object(), "state.data")
    assert "has a state" not in str(caught.value)


def test_a_traced_value_is_refused() -> None:
    with pytest.raises(UnsupportedLeafError, match="jit"):
        jax.jit(lambda x: classify(x, "x"))(1.0)


@given(st.one_of(arrays(), numpy_scalars()))
def test_the_strategies_give_elements_that_are_values_of_their_dtype(array: Any) -> None:
    # A cast normalises bits that are no value (a bool of 7); those of a NaN may change.
    flat = np.asarray(array).reshape(-1)
    same = flat.astype(flat.dtype, copy=True)
    raw, again = flat.tobytes(), same.tobytes()
    assert raw == again
    if flat.dtype.name == "bool":
        assert set(raw) <= {0, 1}
    assert json.dumps(list(array.shape))
