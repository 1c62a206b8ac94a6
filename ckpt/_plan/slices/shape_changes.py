"""Reshaping slices: their elements in C order, as parts of an array of another shape. Pure.

If the axes of both shapes end at the same places, like those of `[d, h * k]` and `[d, h, k]`, a
slice stays one. Otherwise it is cut wherever a row of one shape ends within a row of the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ckpt._plan.slices.array_slices import ArraySlice, slice_of
from ckpt._plan.slices.strides import Shape, Stride, merged


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
