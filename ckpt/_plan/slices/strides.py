"""Strides: the directions in which a slice of a stored array extends. Pure.

The strides along one axis are like the digits of a number: each step is longer than all shorter
strides together can reach. So the elements between two bounds form a few boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

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
