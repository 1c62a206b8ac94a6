"""Host buffers of arrays that are being read, and how chunks get into them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckpt._engine.memory.buffers import Buffers
from ckpt._engine.restore.placement import place_regions
from ckpt._format.dtypes import parse_dtype
from ckpt._format.regions import Region
from ckpt._plan.chunk_reads import ChunkRead, regions_of
from ckpt._plan.targets import ArrayRead

__all__ = ["Destination", "direct_view", "distribute"]

Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class Destination:
    """One array while it is read.

    Attributes:
        number: Number of the read.
        read: What is read.
        left: Chunks still to be read.
        regions: The distinct regions that this process needs, each with its host buffer; none
            before `open`.
    """

    number: int
    read: ArrayRead
    left: int = 0
    regions: list[tuple[Region, Array]] = field(default_factory=list)

    @property
    def is_padded(self) -> bool:
        """Whether the pieces leave room, where there are zeros."""
        filled = sum(piece.target.size for piece in self.read.pieces)
        return self.read.leaf is None and filled < math.prod(self.read.shape)

    def open(self, buffers: Buffers) -> bool:
        """Make the buffers; tell whether they have to be zeroed before they are used."""
        if self.regions:
            return False
        value = self.read.value
        if value is not None:
            self.regions = [(region, _view(value, region)) for region in regions_of(self.read)]
            return False
        kind = parse_dtype(self.read.stored)
        self.regions = [
            (region, buffers.empty(region.shape, kind)) for region in regions_of(self.read)
        ]
        return self.is_padded

    def clear(self) -> None:
        """Fill the buffers with zeros."""
        for _, buffer in self.regions:
            buffer.reshape(-1).view(np.uint8)[...] = 0

    def place(self) -> Any:
        """Return the array; the buffers are its own, or not used any more."""
        return place_regions(self.read, self.regions)


def direct_view(chunk: ChunkRead, destinations: Mapping[int, Destination]) -> Array | None:
    """Return the place of a chunk in the one buffer that wants all of it, or None."""
    if len(chunk.uses) != 1:
        return None
    (use,) = chunk.uses
    if use.source.shape != chunk.covered.shape:
        return None
    region, buffer = destinations[use.read].regions[use.region]
    if not use.target.is_contiguous_in(region.shape):
        return None
    return _view(buffer, use.target).reshape(chunk.covered.shape)


def distribute(chunk: ChunkRead, data: Array, destinations: Mapping[int, Destination]) -> None:
    """Copy what lies in `data`, the chunk's elements, to the buffers that want it."""
    for use in chunk.uses:
        _, buffer = destinations[use.read].regions[use.region]
        view = _view(buffer, use.target)
        view[...] = data[use.source.slices].reshape(view.shape)


def _view(buffer: Array, region: Region) -> Array:
    # The dots: without axes, indexing would give a value instead of a view.
    index: tuple[Any, ...] = (*region.slices, ...)
    view: Array = buffer[index]
    return view
