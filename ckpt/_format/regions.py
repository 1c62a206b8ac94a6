"""Regions: the part of a global array that a shard or a chunk covers."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    import jax

Shape = tuple[int, ...]
Index = tuple[slice, ...]


class Region(Struct, frozen=True, gc=False):
    """A box within an array: `offset` of its first corner and its `shape`."""

    offset: Shape
    shape: Shape

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The region as an index of the array."""
        return tuple(
            slice(start, start + n) for start, n in zip(self.offset, self.shape, strict=True)
        )

    def intersect(self, other: Region) -> Region | None:
        """Return the common part of two regions of one array, or None if there is none."""
        offset = tuple(map(max, self.offset, other.offset))
        ends = (
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(end - start for start, end in zip(offset, ends, strict=True))
        return Region(offset, shape) if all(n > 0 for n in shape) else None

    def within(self, outer: Region) -> Region:
        """Return this region in coordinates relative to the corner of `outer`."""
        offset = tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True))
        return Region(offset, self.shape)

    def is_contiguous_in(self, shape: Shape) -> bool:
        """Return True if the region is one run of memory in a C-ordered array of `shape`."""
        seen_partial = False
        for n, whole in zip(reversed(self.shape), reversed(shape), strict=True):
            if seen_partial and n != 1:
                return False
            seen_partial = seen_partial or n != whole
        return True


def whole(shape: Sequence[int]) -> Region:
    """Return the region that covers an array of `shape`."""
    return _whole(tuple(shape))


# Cached: thousands of leaves have a few shapes.
@functools.lru_cache(maxsize=1024)
def _whole(shape: Shape) -> Region:
    return Region((0,) * len(shape), shape)


def addressable_regions(
    sharding: jax.sharding.Sharding | None, shape: Shape, process: int | None = None
) -> list[tuple[Region, list[int]]]:
    """Return the distinct regions that the devices of a process hold, and which shards hold each.

    Args:
        sharding: Sharding of the array, or None for an array on one device.
        shape: Global shape.
        process: Number of the process; None for this one.

    Returns:
        For every distinct region the positions, in the order of `addressable_shards`, of the
        shards that are replicas of it.
    """
    if sharding is None:
        return [(whole(shape), [0])]
    found: dict[Region, list[int]] = {}
    if process is None:
        indices = list(sharding.addressable_devices_indices_map(shape).values())
    else:
        every: Mapping[jax.Device, Index | None] = sharding.devices_indices_map(shape)
        indices = [index for device, index in every.items() if device.process_index == process]
    for position, index in enumerate(indices):
        region = _region_of(index, shape)
        found.setdefault(region, []).append(position)
    return list(found.items())


def _region_of(index: Index | None, shape: Shape) -> Region:
    if index is None:
        return whole(shape)
    bounds = [part.indices(n)[:2] for part, n in zip(index, shape, strict=True)]
    return Region(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))


def chunk_grid(shape: Sequence[int], chunk: Sequence[int]) -> Shape:
    """Return how many chunks of shape `chunk` tile `shape` along every axis (0 for size-0)."""
    return tuple(-(-n // c) for n, c in zip(shape, chunk, strict=True))


def chunk_region(place: Sequence[int], chunk: Sequence[int], shape: Sequence[int]) -> Region:
    """Return the part of an array of `shape` that the chunk at grid `place` holds."""
    offset = tuple(p * c for p, c in zip(place, chunk, strict=True))
    inside = tuple(min(c, n - o) for c, n, o in zip(chunk, shape, offset, strict=True))
    return Region(offset, inside)


def position_in_grid(place: Sequence[int], grid: Sequence[int]) -> int:
    """Return the number of the chunk at grid `place`, counted in C order."""
    number = 0
    for index, length in zip(place, grid, strict=True):
        number = number * length + index
    return number


def chunks_touching(region: Region, chunk: Sequence[int]) -> Iterator[Shape]:
    """Yield the grid places of the chunks that share an element with `region`, in C order."""
    if not all(region.shape):
        return iter(())
    ranges = (
        range(o // c, (o + n - 1) // c + 1)
        for o, n, c in zip(region.offset, region.shape, chunk, strict=True)
    )
    return itertools.product(*ranges)
