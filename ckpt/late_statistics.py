"""Statistics that are known only after a step was published, kept beside the steps.

They are small notes of the root that nothing depends on: one that is missing, or was left by a step
that was replaced, only leaves some figures unknown. In the step itself they would be bytes that
its manifest does not know of.
"""

from __future__ import annotations

import contextlib

from ckpt.errors import CorruptCheckpointError, StorageError
from ckpt.manifest import Manifest
from ckpt.statistics import SaveStatistics, decode_late, encode_late, of_manifest
from ckpt.storage.base import Storage

__all__ = ["drop_late", "drop_orphans", "keep_late", "statistics_of"]

# Beside what is said of the whole root.
_FOLDER = "metadata"
_SUFFIX = ".statistics.json"
_MAX_BYTES = 4096


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
    """Drop what was kept of entries that somebody else has removed."""
    with contextlib.suppress(StorageError):
        found = [name for name in await storage.notes(_FOLDER) if name.endswith(_SUFFIX)]
        if found:
            entries = set(await storage.entries())
            for name in found:
                if name.removesuffix(_SUFFIX) not in entries:
                    await drop_late(storage, name.removesuffix(_SUFFIX))


def _note(entry: str) -> str:
    return f"{_FOLDER}/{entry}{_SUFFIX}"
