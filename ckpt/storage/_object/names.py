"""Names of objects in a root, and what lies in place of a manifest while it is deleted."""

from __future__ import annotations

import re
import uuid

from ckpt._format.manifest import peek

__all__ = ["GONE", "NAMES", "attempt_of", "deleter_of", "folder_of", "gone", "is_gone", "is_id"]

# Begins what stands in place of a manifest for the moment in which it is deleted. No manifest does.
GONE = b"# "
# Names of entries that were committed lie here, for cheap lists; see `storage.object_lists`.
NAMES = ".ckpt-steps"
_ID = re.compile(r"^[0-9a-f]{32}\Z")
_DELETER = re.compile(rb"^# deleted by ([0-9a-f]{32}), ")


def is_id(name: str) -> bool:
    """Tell whether an attempt may have this id."""
    return _ID.match(name) is not None


def folder_of(path: str) -> str | None:
    """Return the id of the attempt in whose folder a file of an entry lies; None if in none."""
    folder, mark, _ = path.partition("/")
    return folder if mark and is_id(folder) else None


def gone(deleter: str) -> bytes:
    """Return what lies in place of a manifest until the `deleting` record of `deleter` goes."""
    return GONE + f"deleted by {deleter}, {uuid.uuid4().hex}\n".encode()


def deleter_of(data: bytes) -> str | None:
    """Return whose `deleting` record stands behind a tombstone; None where it does not tell."""
    found = _DELETER.match(data)
    return None if found is None else found[1].decode()


def is_gone(data: bytes) -> bool:
    """Tell whether what lies in place of a manifest says that it is being deleted."""
    return data.startswith(GONE)


def attempt_of(data: bytes) -> str | None:
    """Return the attempt that a manifest is of; None where it does not tell."""
    summary = peek(data)
    return None if summary is None else summary.attempt
