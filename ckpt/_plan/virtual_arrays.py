"""Virtual arrays, made of slices of stored arrays: the algebra of stacking, splitting, padding.

An array slice says which region of a stored leaf is which region of the virtual array. Both have
the same lengths, but for axes of length one, which may be anywhere: a stack of ten vectors is ten
slices, and what is read of them depends on the devices that need it.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from ckpt._format.leaf_table import LeafEntry
from ckpt._format.regions import Region, whole

Shape = tuple[int, ...]


class ArraySlice(Struct, frozen=True, gc=False):
    """A region of a stored leaf, and the region of the virtual array that it is.

    Attributes:
        leaf: Number of the stored leaf.
        source: The region of the stored array.
        target: The region of the virtual array.
    """

    leaf: int
    source: Region
    target: Region

    def to_source(self, part: Region) -> Region:
        """Return the region of the stored array that is `part`, a region inside `target`."""
        return _carried(part, self.target, self.source)

    def to_target(self, part: Region) -> Region:
        """Return the region of the virtual array that is `part`, a region inside `source`."""
        return _carried(part, self.source, self.target)


def _carried(part: Region, here: Region, there: Region) -> Region:
    inner = [
        (offset - corner, length)
        for offset, corner, length, full in zip(
            part.offset, here.offset, part.shape, here.shape, strict=True
        )
        if full != 1
    ]
    axes = iter(inner)
    offset, shape = [], []
    for corner, full in zip(there.offset, there.shape, strict=True):
        shift, length = (0, 1) if full == 1 else next(axes)
        offset.append(corner + shift)
        shape.append(length)
    return Region(tuple(offset), tuple(shape))


class VirtualArray(Struct, frozen=True, gc=False):
    """An array that can be made of stored ones.

    Attributes:
        entry: Manifest entry of the leaf that it is, or of the first one that it is made of.
        shape: Its shape.
        leaf: Number of the stored leaf that it is as a whole, or None.
        pieces: Otherwise the slices that it is made of; zeros fill the rest.
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
        """The slices, also of a whole leaf."""
        if self.leaf is None:
            return self.pieces
        everything = whole(self.shape)
        return (ArraySlice(self.leaf, everything, everything),)


def insert_axis(source: VirtualArray, axis: int) -> VirtualArray:
    """Return the array with an axis of length one at `axis`."""

    def with_axis(region: Region) -> Region:
        return Region(_with(region.offset, axis, 0), _with(region.shape, axis, 1))

    pieces = tuple(replace(piece, target=with_axis(piece.target)) for piece in source.parts)
    return replace(source, shape=_with(source.shape, axis, 1), leaf=None, pieces=pieces)


def drop_axis(source: VirtualArray, axis: int) -> VirtualArray:
    """Return the array without its axis `axis`, which has length one."""

    def without_axis(region: Region) -> Region:
        return Region(_without(region.offset, axis), _without(region.shape, axis))

    pieces = tuple(replace(piece, target=without_axis(piece.target)) for piece in source.parts)
    return replace(source, shape=_without(source.shape, axis), leaf=None, pieces=pieces)


def cut(source: VirtualArray, axis: int, start: int, length: int) -> VirtualArray:
    """Return the slice of the array from `start` on along `axis`, `length` long."""
    slab = Region(_at((0,) * len(source.shape), axis, start), _at(source.shape, axis, length))
    pieces = []
    for piece in source.parts:
        common = piece.target.intersect(slab)
        if common is not None:
            pieces.append(ArraySlice(piece.leaf, piece.to_source(common), common.within(slab)))
    return replace(source, shape=slab.shape, leaf=None, pieces=tuple(pieces))


def concatenated(sources: Sequence[VirtualArray], axis: int) -> VirtualArray:
    """Return the arrays one after the other along `axis`; their other lengths are equal."""
    pieces: list[ArraySlice] = []
    end = 0
    for source in sources:
        for piece in source.parts:
            corner = piece.target.offset
            moved = Region(_at(corner, axis, corner[axis] + end), piece.target.shape)
            pieces.append(replace(piece, target=moved))
        end += source.shape[axis]
    first = sources[0]
    used = tuple(name for source in sources for name in source.used)
    return VirtualArray(first.entry, _at(first.shape, axis, end), None, tuple(pieces), used)


def resize(source: VirtualArray, shape: Shape) -> VirtualArray:
    """Return the array cut, or padded with zeros, at the end of every axis to `shape`."""
    found = source
    for axis, length in enumerate(shape):
        if length < found.shape[axis]:
            found = cut(found, axis, 0, length)
    return replace(found, shape=shape, leaf=None, pieces=found.parts)


def _at(values: Shape, axis: int, value: int) -> Shape:
    return (*values[:axis], value, *values[axis + 1 :])


def _with(values: Shape, axis: int, value: int) -> Shape:
    return (*values[:axis], value, *values[axis:])


def _without(values: Shape, axis: int) -> Shape:
    return (*values[:axis], *values[axis + 1 :])
