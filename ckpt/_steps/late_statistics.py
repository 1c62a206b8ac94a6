"""Statistics that are known only after a step was published, kept beside the steps.

They are small notes of the root that nothing depends on: one that is missing, or was left by a step
that was replaced, only leaves some figures unknown. In the step itself they would be bytes that
its manifest does not know of.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json

from ckpt._format.manifest import Manifest
from ckpt._statistics import (
    SaveStatistics,
    decode_late,
    encode_late,
    of_manifest,
)
from ckpt.errors import CorruptCheckpointError, StorageError
from ckpt.storage._base import Storage

__all__ = ["drop_late", "drop_orphans", "keep_late", "statistics_of"]

# Beside what is said of the whole root.
_FOLDER = "metadata"
_SUFFIX = ".statistics.json"
_MAX_BYTES = 4096
_KEYS = {"attempt", *(each.name for each in dataclasses.fields(SaveStatistics))}


async def keep_late(storage: Storage, entry: str, attempt: str, taken: SaveStatistics) -> None:
    """Keep what was taken since the manifest of an entry was written.

    Raises:
        StorageError: The store refused.
    """
    data = encode_late(attempt, taken)
    # What a step left that was replaced is in the way.
    await storage.drop_note(_note(entry), durable=False)
    await storage.put_note(_note(entry), data, replace=False, durable=False)


async def statistics_of(storage: Storage, entry: str, manifest: Manifest) -> SaveStatistics | None:
    """Return where the time of the save of an entry went; None of one that does not tell."""
    early = of_manifest(manifest.statistics)
    if early is None:
        return None
    data = None
    with contextlib.suppress(CorruptCheckpointError, StorageError):
        data = await storage.read_note(_note(entry), _MAX_BYTES)
    return decode_late(data, manifest.attempt, early)


async def drop_late(storage: Storage, entry: str) -> None:
    """Drop what was kept of an entry that is gone."""
    with contextlib.suppress(StorageError):
        await storage.drop_note(_note(entry), durable=False)


async def drop_orphans(storage: Storage) -> None:
    """Drop what was kept of entries that somebody else has removed; nothing that others wrote."""
    with contextlib.suppress(StorageError):
        found = [name for name in await storage.notes(_FOLDER) if name.endswith(_SUFFIX)]
        if found:
            entries = set(await storage.entries())
            for entry in (name.removesuffix(_SUFFIX) for name in found):
                if entry not in entries and await _is_ours(storage, entry):
                    await drop_late(storage, entry)


async def _is_ours(storage: Storage, entry: str) -> bool:
    """Tell whether the note of an entry is one that this library wrote."""
    try:
        document = json.loads(await storage.read_note(_note(entry), _MAX_BYTES) or b"null")
    except (CorruptCheckpointError, StorageError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and "attempt" in document and document.keys() <= _KEYS


def _note(entry: str) -> str:
    return f"{_FOLDER}/{entry}{_SUFFIX}"
