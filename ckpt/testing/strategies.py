"""Hypothesis strategies for everything a checkpoint can hold.

They prefer cases that break checkpoints: keys such as `/`, `.`, `""` and `%`, empty containers, 0-d
and size-0 arrays, every dtype, arrays that are not contiguous or not writable, `nan`, `-0.0`, and
integers beyond 64 bits.

```python
from hypothesis import given
from ckpt.testing.strategies import trees

@given(trees())
def test_what_was_saved_comes_back(tree): ...
```

Needs `hypothesis`.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from ckpt._format.array_format import DTYPES

__all__ = [
    "Box",
    "Empty",
    "Module",
    "Pair",
    "arrays",
    "dtypes",
    "jax_arrays",
    "keys",
    "leaves",
    "numpy_scalars",
    "prng_keys",
    "python_scalars",
    "shapes",
    "shardings",
    "states",
    "string_keys",
    "trees",
]

PyTree = Any
Array = np.ndarray[Any, np.dtype[Any]]

# Characters with a meaning in stored names, file paths, URLs, JSON or formats.
_ODD_CHARACTERS = "/.%\\:;*?\"'<>|{}[]()#@ \0\n\x7f\u00a0\u200b\u00e9\u4e2d\U0001f600kKeE02FA"
_ODD_KEYS = (
    "",
    ".",
    "..",
    "/",
    "%",
    "%e",
    "%k0",
    "%root",
    "%2E",
    "a.b",
    "a/b",
    "zarr.json",
    "c/0",
    "0",
    "01",
    "-1",
    "None",
    "True",
    "\u00e9",
    "e\u0301",
    "x" * 300,
    "." * 300,
)
_INTEGERS = (2**31, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 1 << 500)
_FACTORIES: tuple[type | None, ...] = (None, list, dict, int, float, set, str, tuple)


class Pair(NamedTuple):
    """A namedtuple of two fields."""

    first: Any
    second: Any


class Empty(NamedTuple):
    """A namedtuple without fields."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["kernel", "inner"],
    meta_fields=["name", "settings"],
)
@dataclass
class Module:
    """A registered dataclass of two children, with static fields beside them."""

    kernel: Any
    inner: Any = None
    name: str = ""
    settings: Any = ()


@jax.tree_util.register_pytree_with_keys_class
@dataclass
class Box:
    """A class around one value, such as frameworks use for their parameters."""

    value: Any
    tag: str | None = None

    def tree_flatten_with_keys(self) -> Any:
        """Return the value under its key, and the tag."""
        return ((jax.tree_util.GetAttrKey("value"), self.value),), self.tag

    @classmethod
    def tree_unflatten(cls, tag: str | None, children: Any) -> Box:
        """Return a box around the one child."""
        (value,) = children
        return cls(value, tag)


def dtypes() -> SearchStrategy[np.dtype[Any]]:
    """Return every dtype that can be stored, including those of `ml_dtypes`."""
    return st.sampled_from(list(DTYPES.values()))


def shapes(max_rank: int = 4, max_side: int = 5) -> SearchStrategy[tuple[int, ...]]:
    """Return array shapes, including 0-d and size-0 shapes.

    Args:
        max_rank: Greatest number of dimensions.
        max_side: Greatest length of a dimension.
    """
    return st.lists(st.integers(0, max_side), max_size=max_rank).map(tuple)


def arrays(
    dtype: np.dtype[Any] | SearchStrategy[np.dtype[Any]] | None = None,
    shape: tuple[int, ...] | SearchStrategy[tuple[int, ...]] | None = None,
) -> SearchStrategy[Array]:
    """Return numpy arrays of any bits: C-ordered, Fortran-ordered, strided, reversed, read-only.

    Args:
        dtype: Their dtype or a strategy for it; by default, any that can be stored.
        shape: Their shape or a strategy for it; by default, `shapes()`.
    """
    return _arrays(
        dtypes() if dtype is None else _as_strategy(dtype),
        shapes() if shape is None else _as_strategy(shape),
    )


def numpy_scalars() -> SearchStrategy[np.generic]:
    """Return numpy scalars of every dtype that can be stored."""
    return arrays(shape=()).map(lambda array: cast("np.generic", array[()]))


def python_scalars() -> SearchStrategy[bool | int | float | complex | str | bytes]:
    """Return Python scalars, including integers of any size, all floats, text and bytes."""
    return st.one_of(
        st.booleans(),
        st.integers(),
        st.sampled_from(_INTEGERS),
        st.floats(),
        st.complex_numbers(),
        st.text(max_size=20),
        st.binary(max_size=20),
    )


def leaves() -> SearchStrategy[Any]:
    """Return leaves that need no device: numpy arrays, numpy scalars and Python scalars."""
    return _evenly(python_scalars(), numpy_scalars(), arrays())


@st.composite
def shardings(draw: st.DrawFn, shape: tuple[int, ...]) -> jax.sharding.Sharding:
    """Return shardings for arrays of `shape` over the local devices: single, on meshes, replicated.

    Args:
        draw: Filled in by Hypothesis.
        shape: Shape of the array; it is divisible by all shardings that are drawn.
    """
    devices = jax.devices()
    if draw(st.booleans()):
        return jax.sharding.SingleDeviceSharding(draw(st.sampled_from(devices)))
    count = draw(st.sampled_from([n for n in (1, 2, 3, 4, 8) if n <= len(devices)]))
    rows = draw(st.sampled_from([n for n in (1, 2, 3, 4, 8) if count % n == 0]))
    chosen = draw(st.permutations(devices))[:count] if draw(st.booleans()) else devices[:count]
    mesh = jax.sharding.Mesh(np.array(chosen).reshape(rows, -1), ("x", "y"))
    free = [("x",), ("y",), ("x", "y")]
    spec: list[Any] = []
    for side in shape:
        fitting = [axes for axes in free if side % math.prod(mesh.shape[a] for a in axes) == 0]
        axes = draw(st.sampled_from([None, *fitting]))
        spec.append(axes)
        free = [each for each in free if not set(each) & set(axes or ())]
    places = jax.sharding.PartitionSpec(*spec)  # type: ignore[no-untyped-call]
    return jax.sharding.NamedSharding(mesh, places)


@st.composite
def jax_arrays(
    draw: st.DrawFn, shape: tuple[int, ...] | SearchStrategy[tuple[int, ...]] | None = None
) -> jax.Array:
    """Return jax arrays of every dtype that jax supports here: placed, free, and weakly typed.

    Args:
        draw: Filled in by Hypothesis.
        shape: Their shape or a strategy for it; by default, short ones.
    """
    sides = draw(shapes(3, 8) if shape is None else _as_strategy(shape))
    kind = draw(st.sampled_from(["free", "placed", "placed", "weak"]))
    if kind == "weak":
        return jnp.full(sides, draw(st.sampled_from([0.5, -0.0, float("nan"), 3, -1, 2j])))
    dtype = draw(dtypes().filter(lambda each: jax.dtypes.canonicalize_dtype(each) == each))
    array = jnp.asarray(_from_bytes(draw, dtype, sides))
    return array if kind == "free" else jax.device_put(array, draw(shardings(sides)))


@st.composite
def prng_keys(draw: st.DrawFn) -> jax.Array:
    """Return typed PRNG keys of every implementation: single keys and arrays, some placed."""
    impl = draw(st.sampled_from(["threefry2x32", "rbg", "unsafe_rbg"]))
    sides = draw(st.sampled_from([(), (3,), (2, 0), (8,), (4, 2)]))
    key = jax.random.key(draw(st.integers(0, 2**31 - 1)), impl=impl)
    found = jax.random.split(key, sides) if sides else key
    return jax.device_put(found, draw(shardings(sides))) if draw(st.booleans()) else found


@st.composite
def states(draw: st.DrawFn, max_leaves: int = 10) -> PyTree:
    """Return trees like those of programs: device arrays, keys, modules, and shared arrays.

    Args:
        draw: Filled in by Hypothesis.
        max_leaves: Approximate limit of the leaves of a tree.
    """
    # Sampled leaves come more than once, as one object at several places.
    shared = draw(st.lists(_evenly(jax_arrays(), prng_keys(), arrays()), min_size=1, max_size=2))
    leaf = _evenly(leaves(), jax_arrays(), prng_keys(), st.sampled_from(shared))
    return draw(
        st.recursive(
            trees(leaf, max_leaves=3),
            lambda children: _evenly(_nodes(children), _registered(children)),
            max_leaves=max_leaves,
        )
    )


def string_keys() -> SearchStrategy[str]:
    """Return dict keys that are strings; most of them are awkward."""
    return st.one_of(
        st.text("abc", min_size=1, max_size=3),
        st.sampled_from(_ODD_KEYS),
        st.text(_ODD_CHARACTERS, max_size=6),
        st.text(max_size=6),
    )


def keys() -> SearchStrategy[Hashable]:
    """Return dict keys of every kind that can be stored; not all can be sorted together."""
    return st.one_of(*_sortable_keys())


def trees(leaf: SearchStrategy[Any] | None = None, max_leaves: int = 10) -> SearchStrategy[PyTree]:
    """Return trees of every built-in container, namedtuples and None.

    Args:
        leaf: Strategy for their leaves; by default, `leaves()`.
        max_leaves: Approximate limit of the leaves of a tree.
    """
    small = _evenly(leaves() if leaf is None else leaf, _empty_nodes())
    large = st.recursive(small, _nodes, max_leaves=max_leaves)
    # By itself, `recursive` hardly ever gives a tree that is a single leaf.
    return _evenly(small, large, large, large)


@st.composite
def _evenly(draw: st.DrawFn, *choices: SearchStrategy[Any]) -> Any:
    """Draw from each of `choices` equally often; `one_of` weighs them by their branches."""
    return draw(choices[draw(st.integers(0, len(choices) - 1))])


@st.composite
def _arrays(
    draw: st.DrawFn,
    dtype: SearchStrategy[np.dtype[Any]],
    shape: SearchStrategy[tuple[int, ...]],
) -> Array:
    kind, sides = draw(dtype), draw(shape)
    array = _from_bytes(draw, kind, sides)
    layout = draw(st.sampled_from(["C", "F", "strided", "reversed", "read-only"]))
    if layout == "F":
        return np.array(array, order="F")
    if layout == "read-only":
        array.flags.writeable = False
    elif layout == "strided" and sides:
        array = np.repeat(array, 2, axis=-1)[..., ::2]
    elif layout == "reversed" and sides:
        array = np.flip(np.flip(array, 0).copy(), 0)
    return array


def _from_bytes(draw: st.DrawFn, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    nbytes = math.prod(shape) * dtype.itemsize
    data = np.frombuffer(draw(st.binary(min_size=nbytes, max_size=nbytes)), np.uint8)
    legal = _legal_bytes(dtype)
    if legal is not None:
        data = legal[data % len(legal)]
    return data.copy().view(dtype).reshape(shape)


def _legal_bytes(dtype: np.dtype[Any]) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    """Return the values that a byte of an element may have, or None if all are legal."""
    numbers = {
        "bool": range(2),
        "int2": range(-2, 2),
        "uint2": range(4),
        "int4": range(-8, 8),
        "uint4": range(16),
    }.get(dtype.name)
    if numbers is not None:
        return np.array(numbers).astype(dtype).view(np.uint8)
    return np.arange(16, dtype=np.uint8) if dtype.name == "float4_e2m1fn" else None


def _sortable_keys() -> Sequence[SearchStrategy[Hashable]]:
    """Return kinds of keys; keys of one kind can be sorted, as jax requires for a dict."""
    integers = st.one_of(st.integers(-3, 11), st.sampled_from(_INTEGERS))
    return [
        string_keys(),
        integers,
        st.one_of(integers, st.booleans(), st.floats(allow_nan=False)),
        st.binary(max_size=4),
        st.tuples(string_keys(), integers),
        st.tuples(st.tuples(), st.booleans()),
    ]


def _empty_nodes() -> SearchStrategy[PyTree]:
    makers: list[Callable[[], PyTree]] = [
        lambda: None,
        dict,
        list,
        tuple,
        OrderedDict,
        Empty,
        defaultdict,
        lambda: defaultdict(list),
    ]
    return st.sampled_from(makers).map(lambda make: make())


def _nodes(children: SearchStrategy[PyTree]) -> SearchStrategy[PyTree]:
    dicts = _evenly(*(st.dictionaries(family, children, max_size=4) for family in _sortable_keys()))
    return _evenly(
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        st.builds(Pair, children, children),
        dicts,
        st.builds(defaultdict, st.sampled_from(_FACTORIES), dicts),
        st.dictionaries(keys(), children, dict_class=OrderedDict, max_size=4),
    )


def _registered(children: SearchStrategy[PyTree]) -> SearchStrategy[PyTree]:
    static = _evenly(st.none(), st.just(np.dtype("int8")), st.tuples(python_scalars()))
    return _evenly(
        st.builds(Module, children, children, st.text(max_size=3), static.filter(_is_itself)),
        st.builds(Box, children, st.sampled_from([None, "params"])),
    )


def _is_itself(value: Any) -> bool:
    # A NaN in a treedef makes it unequal to every other treedef.
    return bool(value == value)


def _as_strategy(value: Any) -> SearchStrategy[Any]:
    return value if isinstance(value, SearchStrategy) else st.just(value)
