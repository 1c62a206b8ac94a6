"""Virtual arrays, made of slices of stored arrays: the algebra of stacking, splitting, reshaping.

An array slice maps elements of a stored leaf to elements of the virtual array. A stack of ten
vectors is ten slices; the devices that need the stack decide which parts of them are read.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from ckpt._format.leaf_table import LeafEntry
from ckpt._format.regions import Region, whole
from ckpt._plan.slices.array_slices import ArraySlice, moved, permuted, repeated
from ckpt._plan.slices.shape_changes import reshaped
from ckpt._plan.slices.strides import Shape

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
