"""Advice for restores: chunks that are read whole for a small part, and a better array format."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from msgspec import Struct

from ckpt._format.array_format import MIN_CHUNK_BYTES
from ckpt._format.zarr import choose_chunk

Shape = tuple[int, ...]

# Smaller savings are not worth another array format.
_LEAST_TIMES = 1.1
_LEAST_BYTES = 1 << 20
_NUMBER = re.compile(r"[0-9]+")


class LeafReads(Struct, frozen=True):
    """The reads of an array by all processes together.

    Attributes:
        item: Name of its item; empty if the checkpoint is one object.
        path: Its leaf path.
        shape: Its shape.
        chunks: Shape of its stored chunks.
        region: Shape of the smallest region that a process needs.
        needed: Sum of the bytes of the regions that the processes need.
        read: Sum of the bytes of the chunks that they read, decoded.
        amplification: `read` over `needed`.
    """

    item: str
    path: str
    shape: Shape
    chunks: Shape
    region: Shape
    needed: int
    read: int
    amplification: float


class LayoutAdvice(Struct, frozen=True):
    """An array format with which fewer bytes of some arrays would be read.

    Attributes:
        pattern: A pattern that covers the arrays, with `*` for numbers; the leaf path of a single
            array.
        arrays: Number of the arrays.
        wasted: Bytes of the arrays that all processes together read beyond their need.
        chunk_bytes: For `ArrayFormat`: about the bytes of a region.
        split_axes: For `ArrayFormat`: the axes along which regions end within chunks.
    """

    pattern: str
    arrays: int
    wasted: int
    chunk_bytes: int
    split_axes: tuple[int, ...]


def layout_advice(
    leaves: Iterable[LeafReads], shards: Sequence[Shape], itemsizes: Sequence[int]
) -> list[LayoutAdvice]:
    """Return array formats with which fewer bytes would be read, the worst waste first.

    Args:
        leaves: The reads of each leaf.
        shards: The shape of the shards in which each leaf was saved.
        itemsizes: Bytes of an element of each leaf.
    """
    alike: dict[tuple[str, int, tuple[int, ...]], list[LeafReads]] = {}
    for leaf, shard, itemsize in zip(leaves, shards, itemsizes, strict=True):
        if leaf.amplification < _LEAST_TIMES or leaf.read - leaf.needed < _LEAST_BYTES:
            continue
        found = _format_for(leaf, shard, itemsize)
        if found is not None:
            nbytes, axes = found
            key = (_NUMBER.sub("*", leaf.path), nbytes, axes)
            alike.setdefault(key, []).append(leaf)
    advice = [
        LayoutAdvice(
            pattern if len(each) > 1 else each[0].path,
            len(each),
            sum(leaf.read - leaf.needed for leaf in each),
            nbytes,
            axes,
        )
        for (pattern, nbytes, axes), each in alike.items()
    ]
    return sorted(advice, key=lambda each: (-each.wasted, each.pattern))


def _format_for(leaf: LeafReads, shard: Shape, itemsize: int) -> tuple[int, tuple[int, ...]] | None:
    """Return `chunk_bytes` and `split_axes` that align chunks with the regions, or None."""
    axes = tuple(
        axis
        for axis, (length, chunk) in enumerate(zip(leaf.region, leaf.chunks, strict=True))
        if length % chunk
    )
    nbytes = math.prod(leaf.region) * itemsize
    while axes and nbytes >= MIN_CHUNK_BYTES:
        chunks = choose_chunk(leaf.shape, shard, itemsize, nbytes, axes)
        if not any(length % chunk for length, chunk in zip(leaf.region, chunks, strict=True)):
            return nbytes, axes
        nbytes //= 2
    return None
