"""Process reports: encodes for the primary the chunks that a process has written of an item. Pure.

Every process reports its chunks and their places, with fingerprints of its tree and of the values
that must be the same on all processes.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from ckpt._format.digests import digest
from ckpt._plan.item_reports import DIGEST_BYTES, ROW, ChunkNotes, ItemReport
from ckpt._plan.multihost.tree_fingerprint import TreeFingerprint, first_difference
from ckpt.errors import CorruptCheckpointError

Array = np.ndarray[Any, Any]

_MAGIC = b"ckr3"
# Numbers of files, chunks, bytes of the packed rows, vital signs and copies; for both fingerprints
# the block and the number of bytes.
_HEAD = struct.Struct("<4sQQQQQQQQQ")
# The extension whose notes a report has room for, and the bytes of its records.
_NOTED = "vital_signs"
_RECORD_BYTES, _OTHER_BYTES = 32, 20
_DATA_FILE = re.compile(r"d/([0-9a-f]{32})")


class ProcessReport(Struct, frozen=True):
    """The report of one process on an item.

    Attributes:
        written: The chunks that it has written.
        tree: Fingerprint of the tree; the same on all processes.
        values: Fingerprint of the values that every process has for itself; the same on all
            processes.
    """

    written: ItemReport
    tree: TreeFingerprint
    values: TreeFingerprint

    def pack(self) -> bytes:
        """Return the bytes of the report."""
        written, tree, values = self.written, self.tree, self.values
        rows = zlib.compress(b"".join(written.rows[name].tobytes() for name in ROW.names or ()), 1)
        counts: tuple[int, ...] = (len(written.files), len(written.rows), len(rows))
        notes = written.notes.get(_NOTED)
        counts += (0, 0) if notes is None else (len(notes.records), len(notes.others))
        blocks = (tree.block, len(tree.packed), values.block, len(values.packed))
        matches = [_DATA_FILE.fullmatch(path) for path in written.files]
        names = b"".join(bytes.fromhex(match[1]) for match in matches if match is not None)
        assert len(names) == len(matches) * DIGEST_BYTES, "data files are d/<32 hex digits>"
        body = b"".join(
            (
                _HEAD.pack(_MAGIC, *counts, *blocks),
                tree.signature,
                values.signature,
                names,
                rows,
                written.digests.tobytes(),
                b"" if notes is None else notes.records.tobytes() + notes.others.tobytes(),
                tree.packed,
                values.packed,
            )
        )
        return body + bytes.fromhex(digest(body))

    @staticmethod
    def unpack(data: bytes) -> ProcessReport:
        """Return the report whose bytes are `data`; the inverse of `pack`.

        Raises:
            CorruptCheckpointError: The bytes are not a report, or not a whole one.
        """
        body, checksum = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
        if len(body) < _HEAD.size or bytes.fromhex(digest(body)) != checksum:
            raise _malformed(data, "it is cut short, or was changed on its way")
        magic, files, chunks, packed, signs, copies, *blocks = _HEAD.unpack_from(body)
        tree_block, tree_bytes, value_block, value_bytes = blocks
        lengths = [DIGEST_BYTES, DIGEST_BYTES, files * DIGEST_BYTES, packed]
        lengths += [chunks * DIGEST_BYTES, signs * _RECORD_BYTES, copies * _OTHER_BYTES]
        lengths += [tree_bytes, value_bytes]
        if signs not in (0, chunks):
            raise _malformed(data, f"it has the vital signs of {signs} of {chunks} chunks")
        if magic != _MAGIC or _HEAD.size + sum(lengths) != len(body):
            raise _malformed(data, "its parts do not have the lengths that they should have")
        parts = []
        end = _HEAD.size
        for length in lengths:
            parts.append(body[end : end + length])
            end += length
        names = parts[2].hex()
        written = ItemReport(
            tuple(f"d/{names[start : start + 32]}" for start in range(0, len(names), 32)),
            _rows(parts[3], chunks, data),
            np.frombuffer(parts[4], np.uint8).reshape(chunks, DIGEST_BYTES),
            _notes(chunks, parts[5], parts[6]) if signs or copies else {},
        )
        return ProcessReport(
            written,
            TreeFingerprint(parts[0], tree_block, parts[7]),
            TreeFingerprint(parts[1], value_block, parts[8]),
        )


def _notes(chunks: int, records: bytes, others: bytes) -> dict[str, ChunkNotes]:
    from ckpt._vitals.records import COPY, SIGNS, no_signs

    found = np.frombuffer(records, SIGNS) if records else no_signs(chunks)
    return {_NOTED: ChunkNotes(found, no_signs(1)[0], np.frombuffer(others, COPY))}


def _rows(packed: bytes, chunks: int, data: bytes) -> Array:
    inflater = zlib.decompressobj()
    try:
        raw = inflater.decompress(packed, max(chunks * ROW.itemsize, 1))
    except zlib.error as error:
        raise _malformed(data, f"its rows cannot be read: {error}") from error
    if len(raw) != chunks * ROW.itemsize or not inflater.eof or inflater.unused_data:
        raise _malformed(data, f"its rows are not those of {chunks} chunks")
    rows = np.empty(chunks, ROW)
    start = 0
    for name in ROW.names or ():
        column = np.frombuffer(raw, ROW[name], chunks, start)
        rows[name] = column
        start += column.nbytes
    return rows


def _malformed(data: bytes, reason: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"the report of a process on its save, {len(data)} bytes, cannot be used: {reason}"
    )


def disagreement(reports: Sequence[ProcessReport]) -> str | None:
    """Return the difference between the trees of processes; None if they are the same.

    Args:
        reports: The reports of all processes, in their order.

    Raises:
        CheckpointError: A fingerprint cannot be read.
    """
    first = reports[0]
    for process, report in enumerate(reports):
        if report.tree.signature != first.tree.signature:
            what, here, there = first_difference(first.tree, report.tree)
            return (
                f"the processes save different trees: {what} is {here} on process 0, and {there} "
                f"on process {process}. All processes must save a tree of the same structure, with "
                "the same shapes, dtypes, shardings and formats"
            )
    for process, report in enumerate(reports):
        if report.values.signature != first.values.signature:
            what, here, there = first_difference(first.values, report.values)
            return (
                f"{what} has one value for all processes, but it is {here} on process 0, and "
                f"{there} on process {process}. Make it equal on all of them, make it an array "
                "over devices of all processes, or save it as an item that each has of its own"
            )
    return None
