"""Reshaping slices: their elements in C order, as parts of an array of another shape. Pure.

Where the axes of both shapes end at the same places, as those of `[d, h * k]` and `[d, h, k]` do, a
slice stays one. Otherwise it is cut where a row of one shape ends within a row of the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ckpt._plan.slices.array_slices import ArraySlice, slice_of
from ckpt._plan.slices.strides import Shape, Stride, merged


class _Flat(Struct, frozen=True, gc=False):
    """A slice while its target is one axis, the last parts of which are axes already.

    Attributes:
        start: Place of its first element along the one axis.
        source: The first element in the stored array.
        strides: Those along the one axis.
        corner: The first element along the axes that there are already.
        done: The strides along these.
    """

    start: int
    source: Shape
    strides: tuple[Stride, ...]
    corner: Shape = ()
    done: tuple[Stride, ...] = ()


def reshaped(piece: ArraySlice, old: Shape, new: Shape) -> Iterator[ArraySlice]:
    """Yield the slices of an array of shape `new` that a slice of one of shape `old` becomes."""
    steps = [math.prod(old[axis + 1 :]) for axis in range(len(old))]
    start = sum(map(math.prod, zip(piece.target.offset, steps, strict=True)))
    strides = merged(
        replace(each, axis=0, step=each.step * steps[each.axis]) for each in piece.directions
    )
    yield from _placed(piece.leaf, _Flat(start, piece.source.offset, tuple(strides)), new)


def _placed(leaf: int, flat: _Flat, shape: Shape) -> Iterator[ArraySlice]:
    if not shape:
        yield slice_of(leaf, flat.source, flat.corner, flat.done)
        return
    for part in _split(flat, len(shape) - 1, shape[-1]):
        yield from _placed(leaf, part, shape[:-1])


def _split(flat: _Flat, axis: int, width: int) -> Iterator[_Flat]:
    """Yield the parts of a slice whose elements are the same within each row of `width`."""
    across = [each for each in flat.strides if each.step % width == 0]
    along = [each for each in flat.strides if each.step % width]
    first, reach = flat.start % width, _reach(along)
    if first + reach < width:
        yield _Flat(
            flat.start // width,
            flat.source,
            tuple(replace(each, step=each.step // width) for each in across),
            (first, *flat.corner),
            (*(replace(each, axis=axis) for each in along), *flat.done),
        )
        return
    for part in _cut(flat, max(along, key=lambda each: each.step), reach, width):
        yield from _split(part, axis, width)


def _cut(flat: _Flat, longest: Stride, reach: int, width: int) -> Iterator[_Flat]:
    """Yield the parts of a slice that does not stay within one row, cut along its longest stride.

    Args:
        flat: The slice.
        longest: The stride.
        reach: How far its strides go along the rows together.
        width: The length of a row.
    """
    length, step = longest.length, longest.step
    beyond = reach - (length - 1) * step

    def fitting(number: int) -> int:
        """Return how many elements stay in the row of one with all that is beyond them, or 1."""
        left = width - (flat.start + number * step) % width
        return max((left - 1 - beyond) // step + 1, 1)

    # After so many elements it is at the same place of a row again.
    period = width // math.gcd(step, width)
    head = fitting(0)
    if head < min(period, length) and (flat.start + head * step) % width == 0:
        # Behind the end of the row, it begins with a row.
        yield _taken(flat, longest, 0, [replace(longest, length=head)])
        yield _taken(flat, longest, head, [replace(longest, length=length - head)])
        return
    if period < length:
        whole = length // period * period
        outer = replace(
            longest,
            length=length // period,
            step=step * period,
            source_step=longest.source_step * period,
        )
        yield _taken(flat, longest, 0, [outer, replace(longest, length=period)])
        if whole < length:
            yield _taken(flat, longest, whole, [replace(longest, length=length - whole)])
        return
    number = 0
    while number < length:
        count = min(fitting(number), length - number)
        yield _taken(flat, longest, number, [replace(longest, length=count)])
        number += count


def _taken(flat: _Flat, stride: Stride, first: int, instead: Sequence[Stride]) -> _Flat:
    """Return the part of a slice from an element of a stride on, with others in its place."""
    source = flat.source
    if stride.source is not None:
        place = source[stride.source] + first * stride.source_step
        source = (*source[: stride.source], place, *source[stride.source + 1 :])
    others = (each for each in flat.strides if each is not stride)
    left = tuple(each for each in (*others, *instead) if each.length > 1)
    return replace(flat, start=flat.start + first * stride.step, source=source, strides=left)


def _reach(strides: Sequence[Stride]) -> int:
    return sum((each.length - 1) * each.step for each in strides)
