"""Names of objects in a root, and the tombstone that replaces a manifest during deletion."""

from __future__ import annotations

import re
import uuid

from ckpt._format.manifest_head import peek

# The beginning of a tombstone, which replaces a manifest while a step is deleted.
GONE = b"# "
# The folder with the names of committed step directories, for cheap lists; see `listing`.
NAMES = ".ckpt-steps"
# The folder with the manifests of steps that were deleted and can come back; see `trash`.
TRASH = ".ckpt-trash"
_ID = re.compile(r"^[0-9a-f]{32}\Z")
_DELETER = re.compile(rb"^# deleted by ([0-9a-f]{32}), ")


def is_id(name: str) -> bool:
    """Return True if a name may be the id of an attempt."""
    return _ID.match(name) is not None


def trash_key(step_dir: str, attempt: str) -> str:
    return f"{TRASH}/{step_dir}.{attempt}"


def folder_of(path: str) -> str | None:
    """Return the id of the attempt whose folder holds a file of a step; None if none does."""
    folder, mark, _ = path.partition("/")
    return folder if mark and is_id(folder) else None


def gone(deleter: str) -> bytes:
    """Return a tombstone, which stays until the `deleting` record of `deleter` is removed."""
    return GONE + f"deleted by {deleter}, {uuid.uuid4().hex}\n".encode()


def deleter_of(data: bytes) -> str | None:
    """Return the id of the `deleting` record that a tombstone names; None if it names none."""
    found = _DELETER.match(data)
    return None if found is None else found[1].decode()


def is_gone(data: bytes) -> bool:
    """Return True if an object is a tombstone instead of a manifest."""
    return data.startswith(GONE)


def attempt_of(data: bytes) -> str | None:
    """Return the id of the attempt that wrote a manifest; None if it does not say."""
    summary = peek(data)
    return None if summary is None else summary.attempt
