"""Plain values as JSON: exact both ways, and nothing but plain values from any JSON."""

from __future__ import annotations

import enum
import json
import sys
from collections import OrderedDict
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from ckpt._format.array_format import DTYPES
from ckpt._tree.static_values import class_name, decode_key, decode_value, encode_key, encode_value
from ckpt.errors import CorruptCheckpointError
from ckpt.testing.compare import differences
from ckpt.testing.strategies import keys, numpy_scalars, python_scalars

HERE = __name__


class Color(enum.Enum):
    RED = 1
    CRIMSON = 1
    BLUE = object()


class Level(enum.IntEnum):
    LOW = 1


class Mode(enum.Flag):
    READ = 1
    WRITE = 2


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def round_trip(value: Any) -> Any:
    return decode_value(through_json(encode_value(value)), {})


MEMBERS: list[Any] = [Color.RED, Color.CRIMSON, Color.BLUE, Level.LOW, Mode.READ]
TYPES: list[Any] = [np.float32, np.int8, np.bool_, jnp.float32, jnp.bfloat16, *DTYPES.values()]
PLAIN = st.one_of(
    python_scalars(), numpy_scalars(), st.none(), st.just(...), st.sampled_from(MEMBERS + TYPES)
)
HASHABLE = st.recursive(
    PLAIN.filter(lambda x: x == x), lambda c: st.lists(c, max_size=3).map(tuple)
)
VALUES = st.recursive(
    PLAIN,
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(HASHABLE, children, max_size=3),
    ),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    """Exactly equal, type by type; a NaN is one too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple) and not isinstance(one, PartitionSpec):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, set | frozenset):
        return same(sorted(one, key=repr), sorted(other, key=repr))
    if isinstance(one, bool | int | float | complex | str | bytes | np.generic):
        return differences(one, other) == []
    return one is other or bool(one == other)


@given(VALUES)
def test_a_plain_value_comes_back_exactly(value: Any) -> None:
    assert same(value, round_trip(value))


@given(st.sets(HASHABLE, max_size=4))
def test_sets_come_back_and_are_written_in_one_order(value: set[Any]) -> None:
    for given_set in (value, frozenset(value)):
        found = round_trip(given_set)
        assert type(found) is type(given_set)
        assert found == given_set
    assert encode_value(value) == encode_value({*list(value)[::-1]})


@pytest.mark.parametrize(
    "spec",
    [
        PartitionSpec(),
        PartitionSpec("x", None, ("y", "z")),
        PartitionSpec(None),
        {"in": [PartitionSpec("x")]},
    ],
)
def test_partition_specs_come_back(spec: Any) -> None:
    assert same(spec, round_trip(spec))


@pytest.mark.parametrize("kind", [np.float32, jnp.float32, np.dtype("float32")])
def test_what_stands_for_a_dtype_comes_back_as_the_very_same_thing(kind: Any) -> None:
    assert type(round_trip(kind)) is type(kind)
    assert round_trip(kind) is kind or round_trip(kind) == kind
    assert (round_trip(kind) is jnp.float32) == (kind is jnp.float32)


@given(keys())
def test_a_dict_key_comes_back_exactly(key: Any) -> None:
    assert same(key, decode_key(through_json(encode_key(key))))


def too_deep() -> Any:
    value: Any = ()
    for _ in range(5000):
        value = (value,)
    return value


class Text(str):
    """Not what its base class is."""

    __slots__ = ()


@pytest.mark.parametrize(
    "value",
    [
        object(),
        print,
        int,
        np.zeros(2),
        jnp.zeros(2),
        Mode.READ | Mode.WRITE,
        PartitionSpec(PartitionSpec.UNCONSTRAINED),
        np.dtype("datetime64[s]"),
        np.dtype(">f4"),
        np.datetime64(1, "s"),
        "\ud800",
        {"a": "\ud800"},
        Text("a"),
        OrderedDict(a=1),
        range(3),
        [object()],
        {1: print},
        too_deep(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_plain_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        encode_value(value)


@pytest.mark.parametrize("key", [frozenset("ab"), (1, frozenset("ab")), ((frozenset(),),)])
def test_a_set_is_no_key_since_its_text_has_another_order_in_every_process(key: Any) -> None:
    with pytest.raises(ValueError, match="order"):
        encode_key(key)


def test_a_member_of_an_enumeration_is_looked_up_and_never_made() -> None:
    stored = encode_value(Color.RED)
    assert stored == {"enum": [f"{HERE}:Color", "RED"]}
    assert decode_value(stored, {}) is Color.RED
    gone: Any = {"enum": ["a_module_that_is_gone:Color", "RED"]}
    assert decode_value(gone, {"a_module_that_is_gone:Color": Color}) is Color.RED
    before = set(sys.modules)
    hostile: list[Any] = [gone, {"enum": [f"{HERE}:Color", "GREEN"]}, {"enum": ["os:abort", "x"]}]
    hostile += [{"enum": [f"{HERE}:same", "x"]}, {"enum": ["antigravity:X", "x"]}]
    for each in hostile:
        with pytest.raises(CorruptCheckpointError, match="classes="):
            decode_value(each, {})
    assert set(sys.modules) == before


KINDS = [
    *("bool", "int", "float", "complex", "bytes", "ellipsis", "tuple", "list", "set", "frozenset"),
    *("dict", "numpy", "dtype", "scalar_type", "partition_spec", "enum", "", "eval"),
]
ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.floats(allow_nan=False),
    st.text(max_size=3),
    st.sampled_from(["float32", "int4", "bool", "YQ==", "Bw==", "nan", "0x10", "ff", "1e999"]),
    st.sampled_from(["numpy.float32", "x", class_name(Color), "RED", "os:environ", ":"]),
)
JSON = st.recursive(
    ATOMS,
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.dictionaries(st.sampled_from(KINDS), children, min_size=1, max_size=1),
        st.dictionaries(st.text(max_size=2), children, max_size=2),
    ),
    max_leaves=8,
)


@given(JSON)
def test_any_json_is_a_plain_value_or_corruption(stored: Any) -> None:
    try:
        found = decode_value(stored, {})
    except CorruptCheckpointError:
        return
    again = encode_value(found)
    assert same(found, decode_value(again, {}))


@given(JSON)
def test_any_json_is_a_dict_key_or_corruption(stored: Any) -> None:
    try:
        found = decode_key(stored)
    except CorruptCheckpointError:
        return
    assert len({found: 1}) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("content", [[], {}, [[]], [1, 2], "ab", 1, None, [None], {"a": 1}])
def test_a_kind_with_a_content_that_is_none_of_its_own_is_corruption(
    kind: str, content: Any
) -> None:
    fits = {
        ("tuple", "[]"),
        ("list", "[]"),
        ("set", "[]"),
        ("frozenset", "[]"),
        ("dict", "[]"),
        ("partition_spec", "[]"),
        ("int", '"ab"'),
    }
    collections = {"tuple", "list", "set", "frozenset", "partition_spec"}
    fits |= {(kind, listed) for kind in collections for listed in ("[1, 2]", "[null]")}
    if kind == "ellipsis" or (kind, json.dumps(content)) in fits:
        decode_value({kind: content}, {})
        return
    with pytest.raises(CorruptCheckpointError):
        decode_value({kind: content}, {})


@pytest.mark.parametrize("text", ["@@YQ==", "YQ", "Y Q==", "\u00e9", "YQ==\n"])
@pytest.mark.parametrize("kind", ["bytes", "numpy"])
def test_text_that_is_no_base64_is_corruption(kind: str, text: str) -> None:
    content: Any = text if kind == "bytes" else ["int8", text]
    with pytest.raises(CorruptCheckpointError):
        decode_value({kind: content}, {})


@pytest.mark.parametrize("depth", [200, 900, 100_000])
@pytest.mark.parametrize("kind", ["tuple", "list", "frozenset"])
def test_json_nested_too_deeply_is_corruption(kind: str, depth: int) -> None:
    stored: Any = {kind: []}
    for _ in range(depth):
        stored = {kind: [stored]}
    with pytest.raises(CorruptCheckpointError):
        decode_value(stored, {})
    while stored[kind]:
        (stored,) = stored[kind]
