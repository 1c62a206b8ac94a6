"""What the processes of a job have written of one item, and what the primary makes of it. Pure.

Every process records which chunks it has put where. The primary joins the records: each chunk of
each leaf must be there once. What comes out is what one process that saved everything would have
recorded, but for the names of data files and where in them the chunks lie.
"""

from __future__ import annotations

import math
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt._format.digests import digest
from ckpt._format.dtypes import DTYPES
from ckpt._format.ocdbt import KeyValue
from ckpt._plan.chunking import METADATA_KEY, LeafPlan
from ckpt._plan.data_files import Places
from ckpt._plan.leaf_entries import LeafEntries, StoredChunks, record_chunks
from ckpt._plan.local_chunks import has_chunks
from ckpt._plan.multihost.tree_fingerprint import TreeFingerprint, first_difference, value_outline
from ckpt._plan.ownership import holders_of
from ckpt._plan.save_plan import SavePlan
from ckpt.errors import CheckpointError, CorruptCheckpointError

__all__ = ["ItemReport", "MergedItem", "disagreement", "join", "pack", "record_item", "unpack"]

Array = np.ndarray[Any, Any]

_ROW = np.dtype(
    [("leaf", "<u4"), ("number", "<u4"), ("file", "<u4"), ("offset", "<u8"), ("length", "<u8")]
)
_DIGEST_BYTES = 16
_MAGIC = b"ckr1"
# Files, chunks, bytes of the packed rows; of either outline its block and its bytes.
_HEAD = struct.Struct("<4sQQQQQQQ")
_DATA_FILE = re.compile(r"d/([0-9a-f]{32})")


@dataclass(frozen=True, slots=True, eq=False)
class ItemReport:
    """What one process has written of an item.

    Attributes:
        files: Paths of its data files, relative to the item.
        rows: `[chunks]`, for each chunk its `leaf`, its `number` there, the number of its `file`,
            the `offset` in that, and its `length` if it is encoded, else 0.
        digests: `[chunks, 16] uint8`, the digest of each.
        tree: Fingerprint of the tree; the same on all processes.
        values: Fingerprint of what every process has of its own; the same on all processes.
    """

    files: tuple[str, ...]
    rows: Array
    digests: Array
    tree: TreeFingerprint
    values: TreeFingerprint


@dataclass(frozen=True, slots=True)
class MergedItem:
    """What all processes have written of an item.

    Attributes:
        records: What the manifest says of its leaves.
        entries: The keys of its database; their files are `records.data_files`.
    """

    records: LeafEntries
    entries: list[KeyValue]


def record_item(
    plan: SavePlan,
    tree: TreeFingerprint,
    leaves: Sequence[Any],
    values: Mapping[int, str],
    digests: Sequence[Sequence[str]],
    files: Sequence[str],
    places: Places | None = None,
) -> ItemReport:
    """Return the record of what one process has written.

    Args:
        plan: Its plan.
        tree: The outline of its tree.
        leaves: Python scalars at their places; arrays are not looked at.
        values: Of every array among `plan.own` the digest of its bytes, by number of the leaf.
        digests: Digest of every chunk, by batch and in the order of its chunks.
        files: Path of every batch's file, relative to the item.
        places: Where the chunks lie that were encoded.
    """
    rows: list[tuple[int, int, int, int, int]] = []
    for file, batch in enumerate(plan.batches):
        found = (places or {}).get(file)
        if found is None:
            rows.extend((c.leaf, c.number, file, c.offset, 0) for c in batch.chunks)
        else:
            pairs = zip(batch.chunks, found, strict=True)
            rows.extend((c.leaf, c.number, file, at.offset, at.length) for c, at in pairs)
    raw = bytes.fromhex("".join(each for batch in digests for each in batch))
    return ItemReport(
        tuple(files),
        np.array(rows, _ROW),
        np.frombuffer(raw, np.uint8).reshape(len(rows), _DIGEST_BYTES),
        tree,
        value_outline(plan, leaves, values),
    )


def pack(record: ItemReport) -> bytes:
    """Return a record as bytes."""
    rows = zlib.compress(b"".join(record.rows[name].tobytes() for name in _ROW.names or ()), 1)
    tree, values = record.tree, record.values
    counts = (len(record.files), len(record.rows), len(rows))
    blocks = (tree.block, len(tree.packed), values.block, len(values.packed))
    matches = [_DATA_FILE.fullmatch(path) for path in record.files]
    names = b"".join(bytes.fromhex(match[1]) for match in matches if match is not None)
    assert len(names) == len(matches) * _DIGEST_BYTES, "names of data files are d/<32 hex digits>"
    body = b"".join(
        (
            _HEAD.pack(_MAGIC, *counts, *blocks),
            tree.signature,
            values.signature,
            names,
            rows,
            record.digests.tobytes(),
            tree.packed,
            values.packed,
        )
    )
    return body + bytes.fromhex(digest(body))


def unpack(data: bytes) -> ItemReport:
    """Return the record whose bytes are `data`; the inverse of `pack`.

    Raises:
        CorruptCheckpointError: They are no record, or not a whole one.
    """
    body, checksum = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if len(body) < _HEAD.size or bytes.fromhex(digest(body)) != checksum:
        raise _malformed(data, "it is cut short, or was changed on its way")
    magic, files, chunks, packed, tree_block, tree_bytes, value_block, value_bytes = (
        _HEAD.unpack_from(body)
    )
    lengths = [_DIGEST_BYTES, _DIGEST_BYTES, files * _DIGEST_BYTES, packed]
    lengths += [chunks * _DIGEST_BYTES, tree_bytes, value_bytes]
    if magic != _MAGIC or _HEAD.size + sum(lengths) != len(body):
        raise _malformed(data, "its parts do not have the lengths that they should have")
    parts = []
    end = _HEAD.size
    for length in lengths:
        parts.append(body[end : end + length])
        end += length
    names = parts[2].hex()
    return ItemReport(
        tuple(f"d/{names[start : start + 32]}" for start in range(0, len(names), 32)),
        _rows(parts[3], chunks, data),
        np.frombuffer(parts[4], np.uint8).reshape(chunks, _DIGEST_BYTES),
        TreeFingerprint(parts[0], tree_block, parts[5]),
        TreeFingerprint(parts[1], value_block, parts[6]),
    )


def _rows(packed: bytes, chunks: int, data: bytes) -> Array:
    engine = zlib.decompressobj()
    try:
        raw = engine.decompress(packed, max(chunks * _ROW.itemsize, 1))
    except zlib.error as error:
        raise _malformed(data, f"its rows cannot be read: {error}") from error
    if len(raw) != chunks * _ROW.itemsize or not engine.eof or engine.unused_data:
        raise _malformed(data, f"its rows are not those of {chunks} chunks")
    rows = np.empty(chunks, _ROW)
    start = 0
    for name in _ROW.names or ():
        column = np.frombuffer(raw, _ROW[name], chunks, start)
        rows[name] = column
        start += column.nbytes
    return rows


def _malformed(data: bytes, reason: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"what a process has told of its save, {len(data)} bytes, cannot be used: {reason}"
    )


def disagreement(records: Sequence[ItemReport]) -> str | None:
    """Return how the trees that processes have saved differ, or None where they are the same.

    Args:
        records: The records of all processes, in their order.

    Raises:
        CheckpointError: A record cannot be read.
    """
    first = records[0]
    for process, record in enumerate(records):
        if record.tree.signature != first.tree.signature:
            what, here, there = first_difference(first.tree, record.tree)
            return (
                f"the processes save different trees: {what} is {here} on process 0, and {there} "
                f"on process {process}. All processes must save a tree of the same structure, with "
                "the same shapes, dtypes, shardings and formats"
            )
    for process, record in enumerate(records):
        if record.values.signature != first.values.signature:
            what, here, there = first_difference(first.values, record.values)
            return (
                f"{what} has one value for all processes, but it is {here} on process 0, and "
                f"{there} on process {process}. Make it equal on all of them, make it an array "
                "over devices of all processes, or save it as an item that each has of its own"
            )
    return None


def join(plan: SavePlan, leaves: Sequence[Any], records: Sequence[ItemReport]) -> MergedItem:
    """Return what all processes together have written.

    Args:
        plan: The plan of the primary.
        leaves: Its Python scalars at their places; arrays are not looked at.
        records: The records of all processes, in their order.

    Raises:
        CheckpointError: A chunk was written by no process or by several, or one that there is not;
            names the leaf, the chunk and the processes.
    """
    counts = np.array([_chunk_count(leaf) for leaf in plan.leaves], np.int64)
    firsts = np.concatenate(([0], np.cumsum(counts)))
    rows = np.concatenate([record.rows for record in records])
    starts = np.cumsum([0, *(len(record.rows) for record in records)])
    files = np.cumsum([0, *(len(record.files) for record in records)])
    _check_rows(plan, counts, rows, starts, records)
    places = firsts[rows["leaf"]] + rows["number"]
    times = np.bincount(places, minlength=firsts[-1])
    if (times != 1).any():
        raise _not_once(plan, firsts, int(np.argmax(times != 1)), places, starts)
    processes = np.repeat(np.arange(len(records)), np.diff(starts))
    offsets, lengths, numbers = (np.empty(firsts[-1], np.int64) for _ in range(3))
    offsets[places] = rows["offset"]
    lengths[places] = rows["length"]
    numbers[places] = rows["file"] + files[processes]
    digests = np.empty((firsts[-1], _DIGEST_BYTES), np.uint8)
    digests[places] = np.concatenate([record.digests for record in records])
    text = digests.tobytes().hex()
    every = [text[start : start + 32] for start in range(0, len(text), 32)]
    ranges = [slice(*pair) for pair in zip(firsts[:-1].tolist(), firsts[1:].tolist(), strict=True)]
    encoded = [n for n, leaf in enumerate(plan.leaves) if leaf.compression is not None]
    stored = StoredChunks(
        [every[part] for part in ranges],
        [offsets[part].tolist() for part in ranges],
        [numbers[part].tolist() for part in ranges],
        {number: lengths[ranges[number]].tolist() for number in encoded if counts[number]},
    )
    data_files = [path for record in records for path in record.files]
    entries = list(_entries(plan.leaves, stored))
    return MergedItem(record_chunks(plan, leaves, stored, data_files), entries)


def _chunk_count(leaf: LeafPlan) -> int:
    return math.prod(leaf.grid) if has_chunks(leaf) else 0


def _check_rows(
    plan: SavePlan, counts: Array, rows: Array, starts: Array, records: Sequence[ItemReport]
) -> None:
    """Raise if a row is of a chunk or a file that there is not."""
    known = rows["leaf"] < len(counts)
    leaf = np.where(known, rows["leaf"], 0)
    encoded = np.array([leaf.compression is not None for leaf in plan.leaves] or [False])
    most = np.repeat([len(record.files) for record in records], np.diff(starts))
    limits = counts[leaf] if len(counts) else np.zeros(len(rows), np.int64)
    right = known & (rows["number"] < limits) & (rows["file"] < most)
    right &= (rows["offset"] < 1 << 62) & ((rows["length"] > 0) == encoded[leaf])
    right &= rows["length"] < 1 << 62
    if not right.all():
        wrong = int(np.argmin(right))
        process = int(np.searchsorted(starts, wrong, side="right")) - 1
        row = dict(zip(_ROW.names or (), rows[wrong].tolist(), strict=True))
        raise CheckpointError(
            f"process {process} says that it has written a chunk that the tree does not have: {row}"
        )


def _not_once(
    plan: SavePlan, firsts: Array, place: int, places: Array, starts: Array
) -> CheckpointError:
    number = int(np.searchsorted(firsts, place, side="right")) - 1
    leaf, chunk = plan.leaves[number], place - int(firsts[number])
    writers = np.searchsorted(starts, np.flatnonzero(places == place), side="right") - 1
    if len(writers):
        what = f"was written by the processes {', '.join(map(str, writers.tolist()))}"
    else:
        holders: tuple[int, ...] = (0,)
        if leaf.spec.sharding is not None and number not in plan.own:
            corner = zip(np.unravel_index(chunk, leaf.grid), leaf.chunk, strict=True)
            offset = tuple(int(at) * length for at, length in corner)
            holders = holders_of(leaf.spec.sharding, leaf.spec.shape, offset)
        shown = ", ".join(map(str, holders[:20])) + ", ..." * (len(holders) > 20)
        what = f"was written by no process, and is held by {shown}"
    return CheckpointError(
        f"chunk {chunk} of {math.prod(leaf.grid)} {what}: expected exactly one. All processes must "
        "save the same tree with the same version of this library",
        leaf=leaf.name,
    )


def _entries(leaves: Sequence[LeafPlan], stored: StoredChunks) -> Iterator[KeyValue]:
    for number, leaf in enumerate(leaves):
        if leaf.metadata is None:
            continue
        yield KeyValue(f"{leaf.name}/{METADATA_KEY}".encode(), leaf.metadata)
        source = number if leaf.spec.same_as is None else leaf.spec.same_as
        offsets, files = stored.offsets[source], stored.files[source]
        if not offsets:
            continue
        length = math.prod(leaf.chunk) * DTYPES[leaf.spec.dtype or ""].itemsize
        lengths = stored.lengths.get(source) or [length] * len(offsets)
        keys = _keys(leaf)
        for key, file, offset, nbytes in zip(keys, files, offsets, lengths, strict=True):
            yield KeyValue(key, None, file, offset, nbytes)


def _keys(leaf: LeafPlan) -> list[bytes]:
    """Return the keys of the chunks of a leaf, in C order; see `chunk_key`."""
    keys = [f"{leaf.name}/c".encode()]
    for count in leaf.grid:
        ends = [b"/%d" % index for index in range(count)]
        keys = [key + end for key in keys for end in ends]
    return keys
