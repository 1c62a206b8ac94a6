"""Leaf entries of a manifest, checked before they are used. Pure."""

from __future__ import annotations

import math
import re

from ckpt._format.array_format import CODECS
from ckpt._format.dtypes import parse_dtype
from ckpt._format.manifest import ItemEntry, LeafEntry
from ckpt._format.regions import chunk_grid
from ckpt._tree.leaf_specs import ARRAY_KINDS, CALLABLE, SCALAR_KINDS, decode_scalar
from ckpt.errors import CorruptCheckpointError

# numpy's limit of dimensions; those of zarr and jax are not lower.
_MAX_RANK = 64
_MAX_LENGTH = 1 << 48
_MAX_OFFSET = 1 << 62
# How much longer than twice its size an encoded chunk may be.
_MOST_GROWTH = 1 << 16
# Names come from a file: none may point outside the step.
_DATA_FILE = re.compile(r"^d/[0-9a-f]{32}\Z")


def check_leaves(item: ItemEntry) -> None:
    """Check that the leaf entries of an item can be true, before they are used.

    Raises:
        CorruptCheckpointError: An entry contradicts itself.
    """
    wrong = next((path for path in item.data_files if not _DATA_FILE.match(path)), None)
    if wrong is not None:
        raise CorruptCheckpointError(f"{wrong!r:.120} cannot be the name of a data file")
    seen: set[str] = set()
    # Thousands of leaves share a few shapes.
    possible: set[tuple[object, ...]] = set()
    for number, entry in enumerate(item.leaves):
        if entry.name in seen:
            raise CorruptCheckpointError("two leaves are stored under one name", leaf=entry.name)
        seen.add(entry.name)
        if entry.kind in SCALAR_KINDS:
            decode_scalar(entry)
            continue
        if entry.kind == CALLABLE:
            continue
        if entry.kind not in ARRAY_KINDS:
            raise CorruptCheckpointError(
                f"a leaf of the unknown kind {entry.kind!r:.60}", leaf=entry.name
            )
        count = len(entry.digests)
        is_key = entry.kind == "key"
        if is_key != (entry.impl is not None) or (is_key and not entry.shape):
            raise CorruptCheckpointError(
                "a PRNG key needs an implementation and data of at least one dimension",
                leaf=entry.name,
            )
        form = (entry.dtype, *entry.shape, None, *entry.chunks, count, entry.packed)
        if form not in possible:
            if not _is_possible(entry, parse_dtype(entry.dtype).itemsize):
                raise _contradiction(entry)
            possible.add(form)
        if not entry.offsets and any(entry.digests):
            raise CorruptCheckpointError(
                "the manifest does not say where its chunks are: it has no `offsets`. It was "
                "damaged, or written by a version of this library that was never released",
                leaf=entry.name,
            )
        if not _is_placed(entry, len(item.shardings), len(item.data_files)):
            raise _contradiction(entry)
        if (entry.codec is not None or entry.lengths) and not _is_encoded(entry):
            raise CorruptCheckpointError(
                f"codec {entry.codec!r:.40} and {len(entry.lengths)} lengths do not fit "
                f"{len(entry.digests)} chunks",
                leaf=entry.name,
            )
        if entry.same_as is not None:
            _check_same(item, number, entry.same_as)


def _check_same(item: ItemEntry, number: int, same_as: int) -> None:
    entry = item.leaves[number]
    first = item.leaves[same_as] if 0 <= same_as < number else None
    if first is None or entry != first.model_copy(update={"name": entry.name, "same_as": same_as}):
        raise CorruptCheckpointError(
            f"it cannot be the same array as leaf {same_as}", leaf=entry.name
        )


def _is_possible(entry: LeafEntry, itemsize: int) -> bool:
    """Tell whether shape, chunks and number of digests agree, and such an array can exist."""
    shape, chunk = entry.shape, entry.chunks
    count = len(entry.digests)
    return (
        len(shape) == len(chunk) <= _MAX_RANK
        and all(0 <= n <= _MAX_LENGTH for n in shape)
        and all(1 <= c <= max(n, 1) for c, n in zip(chunk, shape, strict=True))
        and math.prod(max(n, 1) for n in shape) * itemsize <= _MAX_OFFSET
        and math.prod(chunk_grid(shape, chunk)) == count
        and (not entry.packed or count <= 1)
    )


def _is_placed(entry: LeafEntry, shardings: int, files: int) -> bool:
    """Tell whether what an entry refers to exists, and every chunk on this disk has a place."""
    offsets, numbers = entry.offsets, entry.files
    count = len(entry.digests)
    if entry.sharding is not None and not 0 <= entry.sharding < shardings:
        return False
    if not offsets:
        return not numbers
    return (
        len(offsets) == count
        and min(offsets) >= 0
        and max(offsets) <= _MAX_OFFSET
        and files > 0
        and (not numbers or (len(numbers) == count and 0 <= min(numbers) <= max(numbers) < files))
    )


def _is_encoded(entry: LeafEntry) -> bool:
    """Tell whether chunks can be encoded as an entry says; this bounds what is read for one."""
    count = len(entry.digests)
    stored = math.prod(entry.chunks) * parse_dtype(entry.dtype).itemsize
    return (
        entry.codec in CODECS
        and not entry.packed
        and len(entry.offsets) == len(entry.lengths) == count
        and all(0 < length <= _MOST_GROWTH + 2 * stored for length in entry.lengths)
    )


def _contradiction(entry: LeafEntry) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"shape {entry.shape[:8]}, chunks {entry.chunks[:8]}, {len(entry.digests)} digests, "
        f"{len(entry.offsets)} offsets and sharding {entry.sharding} do not fit each other",
        leaf=entry.name,
    )
