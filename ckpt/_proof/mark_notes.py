"""Notes of a root with marks: several marks of one run in each, as columns.

Stores cannot append, so a note is written again with each mark until it is full, and then the next
one begins. A note that was torn by a crash has another digest, and is passed over.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec import Struct

from ckpt._format.manifest_head import digest
from ckpt._proof.state_marks import MARK, StateLayout, StateMark
from ckpt._redaction import redact
from ckpt._runtime.futures import for_each
from ckpt._runtime.threads import run_in_thread
from ckpt.errors import CorruptCheckpointError, StorageError
from ckpt.storage._base import Storage

logger = logging.getLogger("ckpt")

FOLDER = ".ckpt-marks"
# A note with more bytes before they are compressed is full.
MOST_BYTES = 1 << 20
# Notes that are kept; the oldest go.
MOST_NOTES = 64
_LIMIT = 256 << 20
_CONCURRENT = 8
_DIGEST_BYTES = 32
_VERSION = 1


class _Columns(Struct, array_like=True):
    """The content of a note.

    Attributes:
        version: Of this format.
        layout: Names and kinds of the leaves, compressed JSON.
        steps: `[marks] uint64`, little-endian.
        leaves: `[marks, leaves]` of dtype `MARK`, compressed.
    """

    version: int
    layout: bytes
    steps: bytes
    leaves: bytes


def encode_marks(marks: Sequence[StateMark]) -> bytes:
    """Return the note of marks with one layout."""
    columns = _Columns(
        _VERSION,
        zlib.compress(msgspec.json.encode(marks[0].layout), 1),
        np.array([mark.step for mark in marks], "<u8").tobytes(),
        zlib.compress(np.stack([mark.leaves for mark in marks]).tobytes(), 1),
    )
    data = msgspec.msgpack.encode(columns)
    return data + digest(data).encode()


def decode_marks(data: bytes, where: str) -> list[StateMark]:
    """Return the marks of a note.

    Raises:
        CorruptCheckpointError: It was torn, or is of another version.
    """
    content, found = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    try:
        if digest(content).encode() != found:
            raise ValueError("its digest is another")
        columns = msgspec.msgpack.decode(content, type=_Columns)
        if columns.version != _VERSION:
            raise ValueError(f"it is of version {columns.version}")
        layout = msgspec.json.decode(zlib.decompress(columns.layout), type=StateLayout)
        steps = np.frombuffer(columns.steps, "<u8").tolist()
        leaves = np.frombuffer(zlib.decompress(columns.leaves), MARK)
        rows = leaves.reshape(len(steps), len(layout.names))
    except (ValueError, zlib.error, msgspec.MsgspecError) as error:
        raise CorruptCheckpointError(f"{where} cannot be read: {error}") from error
    return [StateMark(step, layout, row) for step, row in zip(steps, rows, strict=True)]


async def prune(storage: Storage) -> None:
    """Remove the oldest notes if there are too many."""
    for name in sorted(await storage.notes(FOLDER))[:-MOST_NOTES]:
        await storage.drop_note(f"{FOLDER}/{name}", durable=False)


async def read_marks(storage: Storage) -> list[dict[int, StateMark]]:
    """Return the marks of each run that has some, by step; the runs in the order of their begin."""
    names = sorted(await storage.notes(FOLDER))
    found: dict[str, list[StateMark]] = {name: [] for name in names[-MOST_NOTES:]}

    async def read(name: str) -> None:
        where = f"{storage.location}/{FOLDER}/{name}"
        try:
            data = await storage.read("", f"{FOLDER}/{name}", _LIMIT)
            if data is not None:
                found[name] = await run_in_thread(decode_marks, data, where)
        except (CorruptCheckpointError, StorageError) as error:
            logger.warning("marks are passed over: %s", redact(str(error)))

    await for_each(read, list(found), _CONCURRENT)
    runs: dict[str, dict[int, StateMark]] = {}
    for name, marks in found.items():
        runs.setdefault(name.partition("-")[2], {}).update({mark.step: mark for mark in marks})
    return [marks for marks in runs.values() if marks]


def marks_of_run_before(runs: Sequence[dict[int, StateMark]], step: int) -> dict[int, StateMark]:
    """Return the marks that a run should repeat whose first mark is of `step`.

    They are those of the latest run that went through this step: it made the checkpoint that this
    run goes on from. Runs that went on from the same one may be wrong in the same way. A run that
    begins anew repeats nothing: it may be of a program that was changed meanwhile.
    """
    have = (marks for marks in reversed(runs) if min(marks) < step <= max(marks))
    return next(have, {})
