"""Zarr v3 as this library writes it: chunk shapes, chunk keys and `zarr.json`.

Chunks are stored whole, in C order, little endian, and uncompressed unless they have a codec. A
dtype that zarr has no name for (`uint4`, `uint2`, `float8_e4m3`) is stored as its bytes in memory,
`uint8`; the manifest keeps the real dtype.
Source: https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from ckpt._format.array_format import Compression
from ckpt._format.dtypes import DTYPES

# Largest factor by which an even cut may take more pieces than an uneven one.
_MOST_PIECES = 8
_NOT_IN_ZARR = frozenset({"uint2", "uint4", "float8_e4m3"})


def stored_dtype(dtype: str) -> str:
    """Return the zarr data type under which arrays of `dtype` are stored."""
    return "uint8" if dtype in _NOT_IN_ZARR else dtype


def zarr_metadata(
    shape: Sequence[int], chunk: Sequence[int], dtype: str, compression: Compression | None = None
) -> dict[str, Any]:
    """Return the zarr v3 array metadata of a stored array, without the version fields."""
    data_type = stored_dtype(dtype)
    fill_value: Any = 0.0 if "float" in data_type else 0
    if data_type == "bool":
        fill_value = False
    elif data_type.startswith("complex"):
        fill_value = [0.0, 0.0]
    one_byte = DTYPES[data_type].itemsize == 1
    endian = {} if one_byte else {"configuration": {"endian": "little"}}
    itemsize = DTYPES[data_type].itemsize
    codecs = [] if compression is None else [compression.codec(itemsize)]
    return {
        "shape": list(shape),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": {"name": "default"},
        "data_type": data_type,
        "codecs": [{"name": "bytes", **endian}, *codecs],
        "fill_value": fill_value,
    }


def zarr_metadata_bytes(
    shape: Sequence[int], chunk: Sequence[int], dtype: str, compression: Compression | None = None
) -> bytes:
    metadata = zarr_metadata(shape, chunk, dtype, compression)
    document = {"zarr_format": 3, "node_type": "array", **metadata}
    return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()


def chunk_key(place: Sequence[int]) -> str:
    """Return the key of the chunk at grid `place` below its array, e.g. `c/0/1`."""
    return "/".join(("c", *map(str, place)))


def choose_chunk(
    shape: Sequence[int],
    shard: Sequence[int],
    itemsize: int,
    target_bytes: int,
    axes: Sequence[int] = (),
    most_bytes: int | None = None,
) -> tuple[int, ...]:
    """Return the chunk shape for an array whose shards have the shape `shard`.

    The first axes are split first: such chunks are one run of memory within a shard. A length with
    a suitable divisor is split evenly, so that no chunk crosses a shard and none is padded. For any
    other length, such as a prime, chunks cross shards or are padded at the edge of the array. Every
    chunk has at most `target_bytes`.

    With `most_bytes` no chunk ever crosses a shard, since another process may hold the next one. If
    a shard has no good divisor, its chunks are larger than `target_bytes`, but not larger than
    `most_bytes` if a divisor allows that.

    Before that, `axes` are cut in turn into equal parts, each as often as the others, as long as
    their lengths have small divisors: finer shards along them then consist of whole chunks.

    Args:
        shape: Global shape.
        shard: Shape of every shard; divides `shape`.
        itemsize: Bytes of one element.
        target_bytes: Upper bound of a chunk.
        axes: Axes to be split before the others, not negative.
        most_bytes: Upper bound of a chunk that must not cross shards; None if chunks may.

    Returns:
        The chunk shape, at least 1 along every axis.
    """
    chunk = [max(n, 1) for n in shard]
    _cut_evenly(chunk, itemsize, target_bytes, axes)
    nbytes = math.prod(chunk) * itemsize
    uneven = []
    for axis in (*axes, *range(len(chunk))):
        if nbytes <= target_bytes:
            break
        row = nbytes // chunk[axis]
        step = _part(chunk[axis], max(target_bytes // row, 1))
        if most_bytes is not None and chunk[axis] % step and shard[axis] != shape[axis]:
            uneven.append(axis)
            continue
        nbytes = row * step
        chunk[axis] = step
    for axis in uneven:
        row = nbytes // chunk[axis]
        chunk[axis] = _divisor(chunk[axis], row, target_bytes, most_bytes or target_bytes)
        nbytes = row * chunk[axis]
    return tuple(chunk)


def _cut_evenly(chunk: list[int], itemsize: int, target_bytes: int, axes: Sequence[int]) -> None:
    """Divide lengths of `chunk` by small factors, always of the axis with the fewest pieces."""
    pieces = dict.fromkeys(axes, 1)
    while pieces and math.prod(chunk) * itemsize > target_bytes:
        # The first of the axes with the same number of pieces.
        axis = min(pieces, key=pieces.__getitem__)
        factor = next((n for n in range(2, _MOST_PIECES + 1) if chunk[axis] % n == 0), None)
        if factor is None:
            del pieces[axis]
            continue
        chunk[axis] //= factor
        pieces[axis] *= factor


def _divisor(length: int, row: int, target_bytes: int, most_bytes: int) -> int:
    """Return the divisor of `length` for the best chunks, of that many rows of `row` bytes."""
    small = (n for n in range(1, math.isqrt(length) + 1) if length % n == 0)
    divisors = sorted({each for n in small for each in (n, length // n)})
    below = [n for n in divisors if n * row <= target_bytes]
    # One chunk that is too large is better than very many that are too small.
    if below and below[-1] * row * _MOST_PIECES**2 >= target_bytes:
        return below[-1]
    above = next(n for n in divisors if n * row > target_bytes or n == length)
    return above if above * row <= most_bytes or not below else below[-1]


def _part(length: int, longest: int) -> int:
    """Return the length of the parts when `length` is cut into parts of at most `longest`."""
    pieces = -(-length // longest)
    # An even cut with a few more pieces is better than a ragged one: no chunk is padded.
    divisors = (n for n in range(pieces, min(_MOST_PIECES * pieces, length) + 1) if length % n == 0)
    count = next(divisors, None)
    if count is not None:
        return length // count
    return -(-length // pieces)
