"""Indexes of arrays: the region that a basic numpy index needs, and the index within it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import Any, SupportsIndex

from ckpt._arguments import shown
from ckpt._format.regions import Region
from ckpt.errors import InvalidArgumentError

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
