"""Manifest entries of leaves: made from a plan after a save, checked before a restore."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ckpt._format.array_format import CODECS
from ckpt._format.dtypes import parse_dtype
from ckpt._format.manifest import ItemEntry, LeafEntry, ShardingEntry
from ckpt._format.regions import chunk_grid
from ckpt._format.shardings import describe_sharding
from ckpt._plan.save_plan import Places, SavePlan
from ckpt._tree.leaf_specs import (
    ARRAY_KINDS,
    CALLABLE,
    SCALAR_KINDS,
    decode_scalar,
    encode_scalar,
)
from ckpt.errors import CorruptCheckpointError

__all__ = ["LeafEntries", "StoredChunks", "check_leaves", "record_chunks", "record_leaves"]

# numpy's own limit of dimensions; zarr and jax have none lower.
_MAX_RANK = 64
_MAX_LENGTH = 1 << 48
_MAX_OFFSET = 1 << 62
# Beyond twice its size an encoded chunk is not longer than this.
_MOST_GROWTH = 1 << 16
# Names come from a file: none may lead out of the step.
_DATA_FILE = re.compile(r"^d/[0-9a-f]{32}\Z")


@dataclass(frozen=True, slots=True)
class LeafEntries:
    """What the manifest says of an item's leaves.

    Attributes:
        leaves: Their entries.
        shardings: The shardings that the entries refer to.
        data_files: The files that hold their chunks, relative to the item.
        nbytes: Logical bytes of all arrays.
    """

    leaves: list[LeafEntry]
    shardings: list[ShardingEntry]
    data_files: list[str]
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredChunks:
    """Where the chunks of all leaves lie, by leaf and in C order of the chunk grid.

    Attributes:
        digests: Their digests.
        offsets: First byte of each within its data file.
        files: Number of the data file.
        lengths: Bytes of every chunk, of leaves whose chunks are encoded.
    """

    digests: Sequence[list[str]]
    offsets: Sequence[list[int]]
    files: Sequence[list[int]]
    lengths: Mapping[int, list[int]]


def record_leaves(
    plan: SavePlan,
    leaves: Sequence[Any],
    digests: Sequence[Sequence[str]],
    data_files: Sequence[str],
    places: Places | None = None,
) -> LeafEntries:
    """Return the entries of leaves that were written by `plan`.

    Args:
        plan: The plan.
        leaves: Python scalars at their places; arrays are not looked at.
        digests: Digest of every chunk, by batch and in the order of its chunks. Of an item
            without batches this may be empty.
        data_files: Path of every batch's file, relative to the item.
        places: Where the chunks lie that were encoded.
    """
    digests_of = [[""] * math.prod(leaf.grid) for leaf in plan.leaves]
    offsets_of = [[0] * len(found) for found in digests_of]
    files_of = [[0] * len(found) for found in digests_of]
    lengths_of: dict[int, list[int]] = {}
    for file, (batch, found) in enumerate(zip(plan.batches, digests, strict=True)):
        for chunk, each in zip(batch.chunks, found, strict=True):
            digests_of[chunk.leaf][chunk.number] = each
            offsets_of[chunk.leaf][chunk.number] = chunk.offset
            files_of[chunk.leaf][chunk.number] = file
        for chunk, place in zip(batch.chunks, (places or {}).get(file, ()), strict=False):
            offsets_of[chunk.leaf][chunk.number] = place.offset
            lengths = lengths_of.setdefault(chunk.leaf, [0] * len(digests_of[chunk.leaf]))
            lengths[chunk.number] = place.length
    chunks = StoredChunks(digests_of, offsets_of, files_of, lengths_of)
    return record_chunks(plan, leaves, chunks, data_files)


def record_chunks(
    plan: SavePlan, leaves: Sequence[Any], stored: StoredChunks, data_files: Sequence[str]
) -> LeafEntries:
    """Return the entries of leaves whose chunks lie where `stored` says.

    Args:
        plan: The plan, of any of the processes that wrote them.
        leaves: Python scalars at their places; arrays are not looked at.
        stored: Where the chunks of all leaves lie.
        data_files: Path of every data file, relative to the item.
    """
    numbers: dict[jax.sharding.Sharding, int] = {}
    # Hashing a sharding is slow, and thousands of leaves share a few.
    known: dict[int, int] = {}
    entries = []
    for number, leaf in enumerate(plan.leaves):
        spec = leaf.spec
        if spec.kind in SCALAR_KINDS:
            value = encode_scalar(spec.kind, leaves[number])
            entries.append(LeafEntry(name=leaf.name, kind=spec.kind, value=value))
            continue
        if spec.kind == CALLABLE:
            entries.append(LeafEntry(name=leaf.name, kind=spec.kind, value=_text(leaves[number])))
            continue
        chunks = number if spec.same_as is None else spec.same_as
        sharding = known.get(id(spec.sharding))
        if sharding is None and spec.sharding is not None:
            sharding = numbers.setdefault(spec.sharding, len(numbers))
            known[id(spec.sharding)] = sharding
        entries.append(
            LeafEntry(
                name=leaf.name,
                kind=spec.kind,
                dtype=spec.dtype,
                shape=list(spec.shape),
                chunks=list(leaf.chunk),
                digests=stored.digests[chunks],
                offsets=stored.offsets[chunks],
                files=stored.files[chunks] if any(stored.files[chunks]) else [],
                codec=None if leaf.compression is None else leaf.compression.name,
                lengths=stored.lengths.get(chunks, []),
                packed=leaf.packed,
                sharding=sharding,
                committed=spec.committed,
                weak_type=spec.weak_type,
                impl=spec.impl,
                same_as=spec.same_as,
            )
        )
    shardings = [describe_sharding(sharding) for sharding in numbers]
    return LeafEntries(entries, shardings, list(data_files), plan.nbytes)


def _text(function: Any) -> str:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', None) or '?'}:{name}"


def check_leaves(item: ItemEntry) -> None:
    """Check that the leaf entries of an item can be true, before anything is made of them.

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
    """Tell whether shape, chunks and number of digests fit each other, and an array can be so."""
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
    """Tell whether what an entry refers to is there, and every chunk has one place or none."""
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
    """Tell whether chunks can be encoded as an entry says; bounds what is read for one."""
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
