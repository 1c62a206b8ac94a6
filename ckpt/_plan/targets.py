"""Array targets: the form in which an array is restored, or the reason why it cannot be.

Virtual arrays, made of slices of stored arrays: the algebra of stacking, splitting, reshaping. An
array slice maps elements of a stored leaf to elements of the virtual array. A stack of ten vectors
is ten slices; the devices that need the stack decide which parts of them are read.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ckpt._format.array_format import DTYPES, UNROUNDED, storable_dtype
from ckpt._format.leaf_table import LeafEntry
from ckpt._format.regions import Region, addressable_regions, whole
from ckpt._plan.slices import ArraySlice, moved, permuted, repeated, reshaped
from ckpt._runtime.threads import caller
from ckpt._tree.leaf_kinds import ARRAY_KINDS, CALLABLE, UNREADABLE
from ckpt.errors import CorruptCheckpointError

Shape = tuple[int, ...]
DType = np.dtype[Any]
# Most slices that a reshape may add. A plan looks at each slice for every device; this many take a
# few seconds.
MOST_SLICES = 10_000


class VirtualArray(Struct, frozen=True, gc=False):
    """An array that can be made of stored ones.

    Attributes:
        entry: Manifest entry of the leaf that it is, or of the first leaf that it is made of.
        shape: Shape of the array.
        leaf: Number of the stored leaf that it is as a whole, or None.
        pieces: The slices that it is made of if it is no whole leaf; zeros fill the rest.
        used: Leaf paths of all stored leaves that it is made of.
    """

    entry: LeafEntry
    shape: Shape
    leaf: int | None
    pieces: tuple[ArraySlice, ...] = ()
    used: tuple[str, ...] = ()

    @staticmethod
    def of(entry: LeafEntry, number: int, path: str) -> VirtualArray:
        """Return the stored leaf `number`, at the leaf path `path`, as it is."""
        return VirtualArray(entry, tuple(entry.shape), number, (), (path,))

    @property
    def parts(self) -> tuple[ArraySlice, ...]:
        """The slices that it is made of; for a whole leaf, the one slice of all of it."""
        if self.leaf is None:
            return self.pieces
        everything = whole(self.shape)
        return (ArraySlice(self.leaf, everything, everything),)


def insert_axis(source: VirtualArray, axis: int) -> VirtualArray:
    """Return the array with an axis of length one at `axis`."""

    def with_axis(piece: ArraySlice) -> ArraySlice:
        region = piece.target
        wider = Region(_insert_at(region.offset, axis, 0), _insert_at(region.shape, axis, 1))
        return moved(piece, wider, lambda each: each + (each >= axis))

    pieces = tuple(map(with_axis, source.parts))
    return replace(source, shape=_insert_at(source.shape, axis, 1), leaf=None, pieces=pieces)


def drop_axis(source: VirtualArray, axis: int) -> VirtualArray:
    """Return the array without its axis `axis`, which has length one."""

    def without_axis(piece: ArraySlice) -> ArraySlice:
        region = piece.target
        narrower = Region(_drop_at(region.offset, axis), _drop_at(region.shape, axis))
        return moved(piece, narrower, lambda each: each - (each > axis))

    pieces = tuple(map(without_axis, source.parts))
    return replace(source, shape=_drop_at(source.shape, axis), leaf=None, pieces=pieces)


def cut(source: VirtualArray, axis: int, start: int, length: int) -> VirtualArray:
    """Return the slice of the array from `start` on along `axis`, `length` long."""
    slab = Region(
        _replace_at((0,) * len(source.shape), axis, start), _replace_at(source.shape, axis, length)
    )
    pieces = tuple(
        replace(part, target=part.target.within(slab))
        for piece in source.parts
        for part in piece.in_target(slab)
    )
    return replace(source, shape=slab.shape, leaf=None, pieces=pieces)


def concatenated(sources: Sequence[VirtualArray], axis: int) -> VirtualArray:
    """Return the arrays one after the other along `axis`; their other lengths are equal."""
    pieces: list[ArraySlice] = []
    end = 0
    for source in sources:
        for piece in source.parts:
            corner = piece.target.offset
            behind = Region(_replace_at(corner, axis, corner[axis] + end), piece.target.shape)
            pieces.append(replace(piece, target=behind))
        end += source.shape[axis]
    first = sources[0]
    used = tuple(name for source in sources for name in source.used)
    return VirtualArray(first.entry, _replace_at(first.shape, axis, end), None, tuple(pieces), used)


def resize(source: VirtualArray, shape: Shape) -> VirtualArray:
    """Return the array cut, or padded with zeros, at the end of every axis to `shape`."""
    found = source
    for axis, length in enumerate(shape):
        if length < found.shape[axis]:
            found = cut(found, axis, 0, length)
    return replace(found, shape=shape, leaf=None, pieces=found.parts)


def transpose(source: VirtualArray, axes: Sequence[int]) -> VirtualArray:
    """Return the array with its axes in another order, `axes[0]` first."""
    pieces = tuple(permuted(piece, axes) for piece in _filled(source))
    shape = tuple(source.shape[axis] for axis in axes)
    return replace(source, shape=shape, leaf=None, pieces=pieces)


def repeat(source: VirtualArray, axis: int, times: int) -> VirtualArray:
    """Return the array with every slice along `axis` `times` in a row."""
    pieces = tuple(repeated(piece, axis, times) for piece in _filled(source))
    shape = _replace_at(source.shape, axis, source.shape[axis] * times)
    return replace(source, shape=shape, leaf=None, pieces=pieces)


def reshape(source: VirtualArray, shape: Shape) -> VirtualArray | None:
    """Return the array with its elements in C order in another shape of the same size.

    None if that would take too many slices: more than `MOST_SLICES` beyond its present ones.
    """
    parts = _filled(source)
    pieces: list[ArraySlice] = []
    for part in parts:
        for piece in reshaped(part, source.shape, shape):
            pieces.append(piece)
            if len(pieces) > len(parts) + MOST_SLICES:
                return None
    return replace(source, shape=shape, leaf=None, pieces=tuple(pieces))


def _filled(source: VirtualArray) -> list[ArraySlice]:
    """Return the slices that are not empty."""
    return [piece for piece in source.parts if piece.size]


def _replace_at(values: Shape, axis: int, value: int) -> Shape:
    return (*values[:axis], value, *values[axis + 1 :])


def _insert_at(values: Shape, axis: int, value: int) -> Shape:
    return (*values[:axis], value, *values[axis:])


def _drop_at(values: Shape, axis: int) -> Shape:
    return (*values[:axis], *values[axis + 1 :])


# Python scalars that arrays without dimensions can be restored as.
PYTHON_TYPES: dict[str, type] = {kind.__name__: kind for kind in (bool, int, float, complex)}
_CATEGORIES: dict[type, str] = {
    bool: jnp.bool_.__name__,
    int: jnp.integer.__name__,
    float: jnp.floating.__name__,
    complex: jnp.complexfloating.__name__,
}
# Dtypes that jax arrays have only if jax has 64 bits switched on.
_OF_64_BITS = frozenset({"int64", "uint64", "float64", "complex128"})


class ArrayTarget(Struct, frozen=True, gc=False):
    """The form in which an array leaf is restored.

    Attributes:
        kind: `jax`, `key`, `numpy`, `numpy_scalar`, or a Python type: `bool`, `int`, `float`,
            `complex`.
        dtype: Dtype of the result; for a PRNG key that of its data.
        sharding: Sharding of a jax array; None for an uncommitted one where jax puts new arrays.
        weak_type: True if it is weakly typed.
        impl: Implementation of a PRNG key.
        is_cast: True if the dtype comes from `Adapt(cast=...)`, so that any loss of precision is
            intended.
    """

    kind: str
    dtype: DType
    sharding: jax.sharding.Sharding | None = None
    weak_type: bool = False
    impl: str | None = None
    is_cast: bool = False


class ArrayRead(Struct, frozen=True, gc=False):
    """One array to read.

    Attributes:
        target: Form in which it is restored.
        shape: Shape of the array; for a PRNG key that of its data.
        stored: Dtype of the stored bytes, which may differ from the target's.
        leaf: Number of the stored leaf that it is as a whole, or None.
        path: Leaf path, for messages.
        pieces: The slices that it is made of if it is no whole leaf; zeros fill the rest.
        value: The array itself if it is already known, from a stored Python scalar.
    """

    target: ArrayTarget
    shape: Shape
    stored: str
    leaf: int | None
    path: str = ""
    pieces: tuple[ArraySlice, ...] = ()
    value: np.ndarray[Any, Any] | None = None

    @property
    def regions(self) -> list[Region]:
        """The distinct regions of it that this process needs."""
        target = self.target
        if target.kind in ("jax", "key") and target.sharding is not None:
            return [region for region, _ in addressable_regions(target.sharding, self.shape)]
        return [whole(self.shape)]


def array_target(leaf: Any, entry: LeafEntry) -> tuple[ArrayTarget, Shape] | None:
    """Return the target of an array-like leaf, and its shape; None if it is not array-like.

    The shape of a PRNG key is that of the key, not of its data.
    """
    if isinstance(leaf, np.ndarray):
        return ArrayTarget("numpy", leaf.dtype), leaf.shape
    if isinstance(leaf, np.generic):
        return ArrayTarget("numpy_scalar", leaf.dtype), ()
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if not isinstance(shape, tuple) or dtype is None:
        return None
    sharding = getattr(leaf, "sharding", None)
    kind, impl = getattr(leaf, "kind", "jax"), getattr(leaf, "impl", None)
    if kind == "jax" and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        fits = entry.impl is not None and _key_dtype(entry.impl) == dtype
        kind, impl = "key", entry.impl if fits else str(dtype)
    if kind == "key":
        dtype = np.dtype(np.uint32)
    try:
        dtype = np.dtype(dtype)
    except TypeError:
        return None
    if kind in ("numpy", "numpy_scalar"):
        return ArrayTarget(kind, dtype), shape
    layout = getattr(getattr(leaf, "format", None), "layout", None)
    if layout is not None and not isinstance(leaf, jax.Array):
        return None
    if not getattr(leaf, "committed", True) or (_is_free(entry) and sharding == _free_place()):
        sharding = None
    weak = bool(getattr(leaf, "weak_type", False))
    return ArrayTarget(kind, dtype, sharding, weak, impl), shape


@functools.cache
def _key_dtype(impl: str) -> Any:
    """Return the dtype of keys of an implementation; None if this process does not have it."""
    try:
        return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype
    except Exception:
        # jax may raise any error for an unknown implementation.
        return None


@functools.cache
def _key_data(impl: str) -> Any:
    """Return shape and dtype of the data of one key; None if this process does not have it."""
    if _key_dtype(impl) is None:
        return None
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=impl)))


def key_shape(entry: LeafEntry) -> Shape:
    """Return the shape of a stored PRNG key: that of its data without the last axis."""
    return tuple(entry.shape[:-1])


def _is_free(entry: LeafEntry) -> bool:
    """Return True if the stored leaf was bound to no devices."""
    return entry.kind in PYTHON_TYPES or (entry.kind in ("jax", "key") and not entry.committed)


def _free_place() -> jax.sharding.Sharding:
    """Return the sharding of uncommitted arrays, which targets made of such arrays have."""
    return jax.sharding.SingleDeviceSharding(default_device())


def default_device() -> jax.Device:
    """Return the device on which jax puts new arrays."""
    chosen = caller().device
    if isinstance(chosen, jax.Device):
        return chosen
    return jax.local_devices(backend=chosen)[0]


def array_problem(
    source: VirtualArray, target: ArrayTarget, shape: Shape, *, casts: bool
) -> str | None:
    """Return the reason why an array cannot be restored as its target, or None.

    Args:
        source: The stored array.
        target: The target.
        shape: The shape of the result; for a PRNG key that of its data.
        casts: True if a cast to another kind of dtype was asked for.
    """
    entry = source.entry
    if (entry.kind == "key") != (target.kind == "key") or entry.impl != target.impl:
        is_key = target.kind == "key"
        return "wanted " + (f"a PRNG key ({target.impl})" if is_key else f"{target.dtype} values")
    if target.kind == "key":
        data = _key_data(target.impl or "")
        if data is None:
            return f"wanted as a PRNG key, but jax has no implementation {target.impl!r:.40} here"
        if (entry.dtype, tuple(entry.shape[-1:])) != (data.dtype.name, data.shape):
            raise CorruptCheckpointError(
                f"{entry.dtype}{entry.shape!s:.80} cannot be the data of {target.impl:.40} keys",
                leaf=entry.name,
            )
    stored = DTYPES[entry.dtype or ""]
    if target.dtype.name not in DTYPES:
        return f"wanted dtype {target.dtype}, which cannot be stored"
    if not casts and not same_category(stored, target.dtype):
        return f"wanted dtype {target.dtype}, which is not of the same kind"
    if target.dtype.name in UNROUNDED and stored != target.dtype:
        return f"wanted dtype {target.dtype}, which has no place for NaN and infinity"
    if target.kind not in ("jax", "key"):
        return None
    if target.dtype.name in _OF_64_BITS and not caller().x64:
        return (
            f"wanted {target.dtype} as a jax array, but jax_enable_x64 is off: jax would cut it to "
            "32 bits. Switch it on, or ask for a 32-bit dtype or a numpy array"
        )
    if target.sharding is not None:
        try:
            target.sharding.shard_shape(shape)
        except Exception as error:
            # jax raises various errors here: ValueError, IndexError, ...
            return f"wanted a sharding that does not divide it ({error})"
    return None


def python_target(leaf: Any, source: VirtualArray) -> ArrayTarget | None:
    """Return the target of an array without dimensions if a Python scalar is wanted, else None.

    A step counter is a Python int in a fresh state, and an array after a jitted step.
    """
    kind = leaf if isinstance(leaf, type) else type(leaf)
    dtype = DTYPES[source.entry.dtype or ""]
    wanted = PYTHON_TYPES.get(kind.__name__)
    if source.shape or source.entry.kind == "key" or wanted is not kind:
        return None
    return ArrayTarget(kind.__name__, dtype) if _category(dtype) == _CATEGORIES[kind] else None


def scalar_value(value: Any, dtype: DType) -> np.ndarray[Any, Any] | None:
    """Return a stored Python scalar as an array without dimensions; None if the dtype cannot."""
    if dtype.name not in DTYPES or _category(dtype) != _CATEGORIES.get(type(value)):
        return None
    if type(value) is int:
        try:
            array = np.asarray(value, np.int64 if value < 0 else np.uint64).astype(dtype)
        except OverflowError:
            return None
        return array if int(array[()]) == value else None
    with np.errstate(all="ignore"):
        array = np.asarray(value).astype(dtype)
    # The value may be rounded, but not made infinite.
    return array if np.isfinite(complex(array[()])) or not np.isfinite(value) else None


def same_category(one: DType, other: DType) -> bool:
    """Return True if two dtypes are both integers, both floating, both complex or both bool."""
    return _category(one) == _category(other)


def _category(dtype: DType) -> str:
    for kind in (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating):
        if jnp.issubdtype(dtype, kind):
            return kind.__name__
    return dtype.name


def is_abstract(leaf: Any) -> bool:
    """Return True if a target leaf is only a description, such as a shape or a type."""
    return isinstance(leaf, type) or (
        hasattr(leaf, "shape") and not isinstance(leaf, jax.Array | np.ndarray | np.generic)
    )


def wanted_text(leaf: Any) -> str:
    """Return a text that describes the wanted leaf, for messages."""
    if leaf is ...:
        return "to be skipped"
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None:
        text = f"{getattr(dtype, 'name', dtype)}{list(shape)}"
        layout = getattr(getattr(leaf, "format", None), "layout", None)
        if layout is None or isinstance(leaf, jax.Array):
            return text
        return (
            f"{text} in the layout {layout.major_to_minor}, and arrays come back in that of jax: "
            "give the sharding alone, and jax.device_put(array, format) what comes back"
        )
    if callable(leaf) and not isinstance(leaf, type):
        return f"the function {getattr(leaf, '__qualname__', type(leaf).__name__):.60}"
    kind = leaf if isinstance(leaf, type) else type(leaf)
    if kind in (bool, int, float, complex, str, bytes):
        return f"a Python {kind.__name__}"
    if isinstance(leaf, jax.sharding.Sharding | jax.Device):
        return (
            f"a {kind.__name__}, which has no shape: give jax.ShapeDtypeStruct(shape, dtype, "
            "sharding=...)"
        )
    if storable_dtype(leaf) is not None:
        return (
            f"the dtype {np.dtype(leaf).name}, which has no shape: give "
            "jax.ShapeDtypeStruct(shape, dtype)"
        )
    return leaf.__name__ if isinstance(leaf, type) else f"a {type(leaf).__name__}"


def stored_text(source: VirtualArray) -> str:
    """Return a text that describes the stored leaf, for messages."""
    entry = source.entry
    if entry.kind == "key":
        return f"PRNG key {entry.impl:.40}{list(source.shape[:-1])}"
    if entry.kind in ARRAY_KINDS:
        return f"{entry.dtype}{list(source.shape)}"
    if entry.kind == CALLABLE:
        return f"the function {entry.value!s:.80}"
    if entry.kind in UNREADABLE:
        return f"something that cannot be read ({entry.value})"
    return f"a Python {entry.kind}" if "_" not in entry.kind else f"a {entry.kind}"
