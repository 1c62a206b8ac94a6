"""Array slices: a region of a stored leaf is a region of another array.

Most slices are plain: both regions have the same lengths in the same order, except for axes of
length one, which may be anywhere. Other slices have strides, which map the axes of one region to
those of the other: axes may change places, be cut or joined, and repeat elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ckpt._format.regions import Region
from ckpt._plan.slices.strides import Box, Shape, Stride, boxes_between, merged


class ArraySlice(Struct, frozen=True, gc=False):
    """A region of a stored leaf, and the region of another array that it becomes.

    Attributes:
        leaf: Number of the stored leaf.
        source: The region of the stored array.
        target: The region of the other array.
        strides: Strides of the elements within the regions, which are then the smallest that hold
            all elements; empty for a plain slice.
    """

    leaf: int
    source: Region
    target: Region
    strides: tuple[Stride, ...] = ()

    @property
    def size(self) -> int:
        """Number of elements of the other array that it covers."""
        if self.strides:
            return math.prod(each.length for each in self.strides)
        return self.target.size

    @property
    def directions(self) -> tuple[Stride, ...]:
        """Its strides, which a plain slice has, too."""
        if self.strides:
            return self.strides
        here, there = (
            [(axis, length) for axis, length in enumerate(region.shape) if length != 1]
            for region in (self.source, self.target)
        )
        return tuple(
            Stride(length, axis, 1, source, 1)
            for (axis, length), (source, _) in zip(there, here, strict=True)
        )

    def to_source(self, part: Region) -> Region:
        """Return the region of the stored array that is `part` of the target of a plain slice."""
        return _carried(part, self.target, self.source)

    def to_target(self, part: Region) -> Region:
        """Return the region of the target that is `part` of the source of a plain slice."""
        return _carried(part, self.source, self.target)

    def in_target(self, region: Region) -> list[ArraySlice]:
        """Return the parts of the slice in a region of the other array."""
        part = self.target.intersect(region)
        if part is None or part == self.target:
            return [] if part is None else [self]
        if not self.strides:
            return [ArraySlice(self.leaf, self.to_source(part), part)]
        sides = [(each.axis, each.step) for each in self.strides]
        return self._cut(self.target, region, sides)

    def in_source(self, region: Region) -> list[ArraySlice]:
        """Return the parts of the slice in a region of the stored array."""
        part = self.source.intersect(region)
        if part is None or part == self.source:
            return [] if part is None else [self]
        if not self.strides:
            return [ArraySlice(self.leaf, part, self.to_target(part))]
        sides = [(each.source, each.source_step) for each in self.strides]
        return self._cut(self.source, region, sides)

    def _cut(
        self, here: Region, region: Region, sides: Sequence[tuple[int | None, int]]
    ) -> list[ArraySlice]:
        """Return the parts in a region, on the side where the strides are `sides`."""
        boxes: list[dict[int, tuple[int, int]]] = [{}]
        for axis, (corner, start, length) in enumerate(
            zip(here.offset, region.offset, region.shape, strict=True)
        ):
            along = sorted(
                (number for number, (each, _) in enumerate(sides) if each == axis),
                key=lambda number: -sides[number][1],
            )
            if along:
                steps = [(self.strides[number].length, sides[number][1]) for number in along]
                found = list(boxes_between(steps, start - corner, start - corner + length))
                boxes = [
                    {**box, **dict(zip(along, more, strict=True))}
                    for box in boxes
                    for more in found
                ]
        whole = [(0, each.length) for each in self.strides]
        return [
            self._part(tuple(box.get(number, every) for number, every in enumerate(whole)))
            for box in boxes
        ]

    def _part(self, box: Box) -> ArraySlice:
        source, target = list(self.source.offset), list(self.target.offset)
        for each, (first, _) in zip(self.strides, box, strict=True):
            target[each.axis] += first * each.step
            if each.source is not None:
                source[each.source] += first * each.source_step
        strides = (
            replace(each, length=length)
            for each, (_, length) in zip(self.strides, box, strict=True)
        )
        return slice_of(self.leaf, tuple(source), tuple(target), strides)


def slice_of(leaf: int, source: Shape, target: Shape, strides: Iterable[Stride]) -> ArraySlice:
    """Return the slice whose first elements are at `source` and `target`."""
    found = merged(strides)
    source_shape, target_shape = [1] * len(source), [1] * len(target)
    for each in found:
        target_shape[each.axis] += (each.length - 1) * each.step
        if each.source is not None:
            source_shape[each.source] += (each.length - 1) * each.source_step
    here, there = Region(source, tuple(source_shape)), Region(target, tuple(target_shape))
    return ArraySlice(leaf, here, there, () if _is_plain(found) else tuple(found))


def _is_plain(strides: Sequence[Stride]) -> bool:
    """Return True if strides, in C order of the target, take axis after axis as it is."""
    last = -1, -1
    for each in strides:
        if each.source is None or (each.step, each.source_step) != (1, 1):
            return False
        if each.axis <= last[0] or each.source <= last[1]:
            return False
        last = each.axis, each.source
    return True


def moved(piece: ArraySlice, target: Region, place: Callable[[int], int]) -> ArraySlice:
    """Return a slice whose target gains or loses axes of length one.

    Args:
        piece: The slice.
        target: The region of the new array.
        place: Function from the number of an axis to its new number.
    """
    strides = tuple(replace(each, axis=place(each.axis)) for each in piece.strides)
    return replace(piece, target=target, strides=strides)


def permuted(piece: ArraySlice, axes: Sequence[int]) -> ArraySlice:
    """Return a slice in which axis `axes[0]` of the target becomes the first one, and so on."""
    places = {axis: place for place, axis in enumerate(axes)}
    target = tuple(piece.target.offset[axis] for axis in axes)
    strides = (replace(each, axis=places[each.axis]) for each in piece.directions)
    return slice_of(piece.leaf, piece.source.offset, target, strides)


def repeated(piece: ArraySlice, axis: int, times: int) -> ArraySlice:
    """Return a slice with each element `times` in a row along an axis of the target."""
    strides = [
        replace(each, step=each.step * times) if each.axis == axis else each
        for each in piece.directions
    ]
    corner = piece.target.offset
    target = (*corner[:axis], corner[axis] * times, *corner[axis + 1 :])
    again = Stride(times, axis, 1, None, 0)
    return slice_of(piece.leaf, piece.source.offset, target, [*strides, again])


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
