"""Names of objects in a root, the list of its step directories, and steps of other libraries.

The list of step directories in an object store. A store lists objects, not folders, so a list grows
with the number of files in all steps. Therefore a large root is listed completely only now and
then. In between, only the names are listed: objects that writers of this library leave beside the
steps before they commit them. Steps that other tools copy into a large root are found a little
later.
"""

from __future__ import annotations

import re
import time
import uuid

from ckpt._format.manifest_head import FILE_NAME, peek
from ckpt._format.step_files import BEGUN, SUCCESS
from ckpt._runtime.futures import for_each
from ckpt.storage._object.leases import record_names
from ckpt.storage._store import Store, StoredObject

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


# Files that mark a step of Orbax.
MARKS = (SUCCESS, BEGUN)


async def is_foreign(keys: Store, step_dir: str) -> bool:
    """Return True if Orbax has written a step directory, finished or not, or it is a file."""
    found: dict[str, StoredObject | None] = {}

    async def look(name: str) -> None:
        read = keys.get(f"{step_dir}/{name}") if name else keys.get(step_dir, 0, 1)
        found[name] = await read

    await for_each(look, ("", *MARKS))
    success = found[SUCCESS]
    if success is None:
        return (found[BEGUN] or found[""]) is not None
    # Orbax writes the path of the step into it, this library the name alone.
    return b"/" in success.data


async def remove_foreign(keys: Store, step_dir: str) -> bool:
    """Remove a foreign step, first the files that mark it; False if there is none."""
    if not await is_foreign(keys, step_dir):
        return False
    await for_each(keys.delete, (step_dir, *(f"{step_dir}/{name}" for name in MARKS)))
    # Folders of attempts hold objects of this library, such as those of a step in the trash.
    below = [path for path in await keys.list(f"{step_dir}/") if folder_of(path) is None]
    await for_each(lambda path: keys.delete(f"{step_dir}/{path}"), below)
    return True


# Keys that a store returns at a time; a list of fewer takes one request in any case.
_ONE_REQUEST = 1000
_LEAST_SECONDS = 60.0
# Largest share of the time that listing the whole root may take.
_SHARE = 0.01
_OWN = ".ckpt-"
# Files that make a directory a step.
_MARKS = frozenset({FILE_NAME, *MARKS})


class StepListing:
    """Lists the step directories of one root. Its coroutines run on one event loop."""

    def __init__(self, keys: Store) -> None:
        self._keys = keys
        # Step directories without a name from their writer: other tools copied them there.
        self._copied: frozenset[str] = frozenset()
        self._next = 0.0

    async def step_dirs(self) -> list[str]:
        """Return the names of the step directories that have, or had a moment ago, a manifest.

        A step that Orbax has marked counts, too, and an object whose name ends in a number, like
        the steps of Flax.
        """
        if time.monotonic() < self._next:
            names = await self._keys.list(f"{NAMES}/")
            return sorted(self._copied | _step_dirs_of(names))
        began = time.monotonic()
        found = await self._keys.list("")
        start = f"{NAMES}/"
        named = _step_dirs_of([key.removeprefix(start) for key in found if key.startswith(start)])
        pairs = [key.split("/") for key in found]
        there = {pair[0] for pair in pairs if len(pair) == 2 and pair[1] in _MARKS}
        there |= {pair[0] for pair in pairs if len(pair) == 1 and pair[0][-1:].isdecimal()}
        there = {name for name in there if not name.startswith(_OWN)}
        self._copied = frozenset(there - named)
        if len(found) >= _ONE_REQUEST:
            now = time.monotonic()
            self._next = now + max(_LEAST_SECONDS, (now - began) / _SHARE)
        return sorted(there)


def _step_dirs_of(names: list[str]) -> set[str]:
    return {found[0] for name in names if (found := record_names(name)) is not None}
