"""Slices of wanted arrays, carried over to the arrays that are stored. Pure.

Strides: the directions in which a slice of a stored array extends. Pure. The strides along one axis
are like the digits of a number: each step is longer than all shorter strides together can reach. So
the elements between two bounds form a few boxes.

Array slices: a region of a stored leaf is a region of another array. Most slices are plain: both
regions have the same lengths in the same order, except for axes of length one, which may be
anywhere. Other slices have strides, which map the axes of one region to those of the other: axes
may change places, be cut or joined, and repeat elements.

Reshaping slices: their elements in C order, as parts of an array of another shape. Pure. If the
axes of both shapes end at the same places, like those of `[d, h * k]` and `[d, h, k]`, a slice
stays one. Otherwise it is cut wherever a row of one shape ends within a row of the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from types import EllipsisType
from typing import Any, SupportsIndex

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ckpt._arguments import shown
from ckpt._format.regions import Region
from ckpt.errors import InvalidArgumentError

Shape = tuple[int, ...]
Array = np.ndarray[Any, Any]
# First element and number of elements of each stride.
Box = tuple[tuple[int, int], ...]


class Stride(Struct, frozen=True, gc=False):
    """A direction of a slice, with the distances of its elements in both arrays.

    Attributes:
        length: Number of elements.
        axis: Axis of the target.
        step: Distance between elements along that axis.
        source: Axis of the stored array; None if all elements are one stored element.
        source_step: Distance between elements along that axis.
    """

    length: int
    axis: int
    step: int
    source: int | None
    source_step: int


def merged(strides: Iterable[Stride]) -> list[Stride]:
    """Return the same elements with as few strides as possible, in C order of the target."""
    found: list[Stride] = []
    for each in sorted(strides, key=lambda stride: (stride.axis, -stride.step)):
        if each.length == 1:
            continue
        last = found[-1] if found else None
        if (
            last is not None
            and (last.axis, last.source) == (each.axis, each.source)
            and last.step == each.step * each.length
            and last.source_step == each.source_step * each.length
        ):
            found[-1] = replace(each, length=last.length * each.length)
        else:
            found.append(each)
    return found


def boxes_between(strides: Sequence[tuple[int, int]], low: int, high: int) -> Iterator[Box]:
    """Yield the boxes of the elements whose place along an axis is from `low` up to `high`.

    Args:
        strides: Length and step of each stride, the longest step first.
        low: The first place.
        high: The place after the last.
    """
    reach = sum((length - 1) * step for length, step in strides)
    if high <= 0 or low > reach:
        return
    if low <= 0 and reach < high:
        yield tuple((0, length) for length, _ in strides)
        return
    (length, step), rest = strides[0], strides[1:]
    # Distance that the shorter strides reach from each element.
    beyond = reach - (length - 1) * step
    touching = range(max(0, -((beyond - low) // step)), min(length, -(-high // step)))
    inside = range(max(0, -(-low // step)), min(length, (high - 1 - beyond) // step + 1))
    if inside:
        yield ((inside.start, len(inside)), *((0, each) for each, _ in rest))
    for number in touching:
        if number not in inside:
            for box in boxes_between(rest, low - number * step, high - number * step):
                yield ((number, 1), *box)


def is_one_run(strides: Sequence[Stride], stored: Shape, target: Shape) -> bool:
    """Return True if elements are consecutive in both arrays, in the same order.

    Args:
        strides: Strides in C order of the target.
        stored: Shape of the stored array.
        target: Shape of the other array.
    """
    count = 1
    for each in reversed(strides):
        if each.source is None:
            return False
        here = each.source_step * math.prod(stored[each.source + 1 :])
        there = each.step * math.prod(target[each.axis + 1 :])
        if (here, there) != (count, count):
            return False
        count *= each.length
    return True


def copy_strided(
    stored: Array, corner: Shape, target: Array, place: Shape, strides: Sequence[Stride]
) -> None:
    """Copy the elements of a stored array from `corner` on to those of another from `place` on."""
    steps = [
        0 if each.source is None else stored.strides[each.source] * each.source_step
        for each in strides
    ]
    part = _view(stored, corner, strides, steps)
    steps = [target.strides[each.axis] * each.step for each in strides]
    _view(target, place, strides, steps)[...] = part


def _view(array: Array, corner: Shape, strides: Sequence[Stride], steps: Sequence[int]) -> Array:
    # With the ellipsis, indexing an array without axes gives a view, not a value.
    index: tuple[Any, ...] = (*(slice(first, None) for first in corner), ...)
    shape = tuple(map(attrgetter("length"), strides))
    return np.lib.stride_tricks.as_strided(array[index], shape, steps)


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


class _Flat(Struct, frozen=True, gc=False):
    """A slice on the way to its new shape: the first axes are still one, the last ones are done.

    Attributes:
        start: Place of its first element along the single axis.
        source: Place of its first element in the stored array.
        strides: The strides along the single axis.
        corner: Place of its first element along the finished axes.
        done: The strides along the finished axes.
    """

    start: int
    source: Shape
    strides: tuple[Stride, ...]
    corner: Shape = ()
    done: tuple[Stride, ...] = ()


def reshaped(piece: ArraySlice, old: Shape, new: Shape) -> Iterator[ArraySlice]:
    """Yield the slices of shape `new` that a slice of an array of shape `old` becomes."""
    steps = [math.prod(old[axis + 1 :]) for axis in range(len(old))]
    start = sum(map(math.prod, zip(piece.target.offset, steps, strict=True)))
    strides = merged(
        replace(each, axis=0, step=each.step * steps[each.axis]) for each in piece.directions
    )
    yield from _place_in_shape(piece.leaf, _Flat(start, piece.source.offset, tuple(strides)), new)


def _place_in_shape(leaf: int, flat: _Flat, shape: Shape) -> Iterator[ArraySlice]:
    if not shape:
        yield slice_of(leaf, flat.source, flat.corner, flat.done)
        return
    for part in _split(flat, len(shape) - 1, shape[-1]):
        yield from _place_in_shape(leaf, part, shape[:-1])


def _split(flat: _Flat, axis: int, width: int) -> Iterator[_Flat]:
    """Yield parts of a slice that each have the same places in every row of `width`."""
    across = [each for each in flat.strides if each.step % width == 0]
    along = [each for each in flat.strides if each.step % width]
    first, reach = flat.start % width, sum((each.length - 1) * each.step for each in along)
    if first + reach < width:
        yield _Flat(
            flat.start // width,
            flat.source,
            tuple(replace(each, step=each.step // width) for each in across),
            (first, *flat.corner),
            (*(replace(each, axis=axis) for each in along), *flat.done),
        )
        return
    for part in _cut_flat(flat, max(along, key=lambda each: each.step), reach, width):
        yield from _split(part, axis, width)


def _cut_flat(flat: _Flat, longest: Stride, reach: int, width: int) -> Iterator[_Flat]:
    """Yield the parts of a slice that leaves its row, cut along its longest stride.

    Args:
        flat: The slice.
        longest: The longest stride.
        reach: Distance that the strides along the row cover together.
        width: Length of a row.
    """
    length, step = longest.length, longest.step
    beyond = reach - (length - 1) * step

    def fitting(number: int) -> int:
        """Return how many elements from `number` on fit into its row with their reach, or 1."""
        left = width - (flat.start + number * step) % width
        return max((left - 1 - beyond) // step + 1, 1)

    # After this many elements, the place in the row repeats.
    period = width // math.gcd(step, width)
    head = fitting(0)
    if head < min(period, length) and (flat.start + head * step) % width == 0:
        # Beyond the end of the first row, the rest begins at the start of a row.
        yield _take_from(flat, longest, 0, [replace(longest, length=head)])
        yield _take_from(flat, longest, head, [replace(longest, length=length - head)])
        return
    if period < length:
        whole = length // period * period
        outer = replace(
            longest,
            length=length // period,
            step=step * period,
            source_step=longest.source_step * period,
        )
        yield _take_from(flat, longest, 0, [outer, replace(longest, length=period)])
        if whole < length:
            yield _take_from(flat, longest, whole, [replace(longest, length=length - whole)])
        return
    number = 0
    while number < length:
        count = min(fitting(number), length - number)
        yield _take_from(flat, longest, number, [replace(longest, length=count)])
        number += count


def _take_from(flat: _Flat, stride: Stride, first: int, instead: Sequence[Stride]) -> _Flat:
    """Return the part of a slice from an element of a stride on, with that stride replaced."""
    source = flat.source
    if stride.source is not None:
        place = source[stride.source] + first * stride.source_step
        source = (*source[: stride.source], place, *source[stride.source + 1 :])
    others = (each for each in flat.strides if each is not stride)
    left = tuple(each for each in (*others, *instead) if each.length > 1)
    return replace(flat, start=flat.start + first * stride.step, source=source, strides=left)


# Parts of an index of a region.
Within = tuple[int | slice, ...]


def region_of_index(index: Any, shape: Sequence[int]) -> tuple[Region, Within]:
    """Return the smallest region of an array that an index needs, and the index within it.

    Applied to the region, the second index has the result of `index` on the array.

    Args:
        index: Integers, slices and `...`, alone or in a tuple, as numpy takes them.
        shape: The shape of the array.

    Raises:
        InvalidArgumentError: The index is of another kind, has too many parts, or is out of bounds.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, slice | EllipsisType | SupportsIndex):
            raise InvalidArgumentError(
                f"array[{shown(part)}]: expected integers, slices and '...'. Take such a part of "
                "what a slice has returned"
            )
    open_parts = [number for number, part in enumerate(parts) if part is ...]
    given = len(parts) - len(open_parts)
    if given > len(shape) or len(open_parts) > 1:
        raise InvalidArgumentError(
            f"array[{shown(index)}]: it has {len(shape)} axes, and the shape {list(shape)}"
        )
    everything = [slice(None)] * (len(shape) - given)
    place = open_parts[0] if open_parts else len(parts)
    parts[place : place + 1] = everything
    offset, lengths, within = [], [], []
    for axis, (part, size) in enumerate(zip(parts, shape, strict=True)):
        begin, length, rest = _part(part, size, axis)
        offset.append(begin)
        lengths.append(length)
        within.append(rest)
    return Region(tuple(offset), tuple(lengths)), tuple(within)


def _part(part: Any, size: int, axis: int) -> tuple[int, int, int | slice]:
    """Return begin and length of the needed part of one axis, and the index within it."""
    if not isinstance(part, slice):
        number = part.__index__()
        if not -size <= number < size:
            raise InvalidArgumentError(f"array[{number}]: axis {axis} has the length {size}")
        return number % size, 1, 0
    try:
        taken = range(*part.indices(size))
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"array[{shown(part)}]: {error}") from error
    if not taken:
        return 0, 0, slice(None)
    first, last = min(taken[0], taken[-1]), max(taken[0], taken[-1])
    rest = slice(None) if taken.step == 1 else slice(None, None, taken.step)
    return first, last - first + 1, rest
