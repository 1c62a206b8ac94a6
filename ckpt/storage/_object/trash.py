"""The trash of an object store: the manifest of a step moves, and its other objects stay.

An entry is the object `.ckpt-trash/<step>.<attempt>`: a line with the time of the deletion, and the
manifest. As long as it exists, nobody removes the objects of the attempt (see `removal`).
docs/design/006-object-stores.md has the order of these operations.
"""

from __future__ import annotations

import logging
import time
import uuid

import anyio

from ckpt._format.manifest_head import FILE_NAME, peek, peek_files
from ckpt._runtime.futures import for_each
from ckpt.errors import (
    CorruptCheckpointError,
    InvalidArgumentError,
    StepNotFoundError,
    StorageError,
)
from ckpt.storage._base import TrashEntry, undelete_exists, undelete_missing
from ckpt.storage._object import leases
from ckpt.storage._object.attempts import not_being_deleted
from ckpt.storage._object.listing import (
    NAMES,
    TRASH,
    attempt_of,
    gone,
    is_foreign,
    is_gone,
    is_id,
    trash_key,
)
from ckpt.storage._object.removal import finish, remove_plain_files
from ckpt.storage._store import Store, StoredObject

logger = logging.getLogger("ckpt")

_NAMED_FILES = 3
# Nanoseconds have nineteen digits for centuries.
_TIME_DIGITS = 20


async def move(keys: Store, step_dir: str, seconds: float) -> str | None:
    """Move a step directory to the trash; return its key there, None if it does not exist.

    Raises:
        InvalidArgumentError: Orbax wrote it, so it has no manifest.
        CorruptCheckpointError: Its manifest does not name its attempt.
    """
    where, key = f"{keys.location}/{step_dir}", f"{step_dir}/{FILE_NAME}"
    found = await keys.get(key)
    if found is None and await is_foreign(keys, step_dir):
        raise InvalidArgumentError(
            f"{where}: Orbax wrote it, and in a bucket only steps of this library go to the trash. "
            "Delete it with a manager that has no trash"
        )
    if found is None or is_gone(found.data):
        return None
    attempt = attempt_of(found.data)
    if attempt is None or not is_id(attempt):
        raise CorruptCheckpointError(
            f"{where}/{FILE_NAME} is damaged, so it cannot go to the trash. Delete it with a "
            "manager that has no trash"
        )
    entry = trash_key(step_dir, attempt)
    await keys.put(entry, f"{time.time_ns()}\n".encode() + found.data)
    deleter = uuid.uuid4().hex
    record = await leases.make(keys, step_dir, deleter, seconds, "deleting")
    if record is None:
        raise StorageError(f"{where}: the store did not create a new object")
    await keys.delete(f"{NAMES}/{step_dir}.{attempt}")
    swap = await keys.swap(key, gone(deleter), found.generation)
    # If the step was replaced or deleted meanwhile, its entry stays: its objects may be there.
    await finish(keys, record)
    return entry if swap.generation is not None else None


async def entries(keys: Store) -> list[TrashEntry]:
    found: list[TrashEntry] = []

    async def look(name: str) -> None:
        names = leases.record_names(name)
        entry = await keys.get(f"{TRASH}/{name}")
        if names is None or entry is None:
            return
        manifest = await keys.get(f"{names[0]}/{FILE_NAME}")
        # If the step is there, a process died while it deleted or undeleted it, and left the entry.
        is_there = manifest is not None and attempt_of(manifest.data) == names[1]
        time_ns, data = _parts_of(entry)
        summary = peek(data)
        if not is_there and time_ns is not None and summary is not None:
            path = f"{keys.location}/{TRASH}/{name}"
            found.append(TrashEntry(name, names[0], path, time_ns, summary.save))

    await for_each(look, await keys.list(f"{TRASH}/"))
    return found


async def undelete(keys: Store, name: str, step_dir: str, seconds: float) -> None:
    """Put the manifest of an entry back.

    Raises:
        StepNotFoundError: The entry is gone.
        StepExistsError: There is a step directory of that name.
        CorruptCheckpointError: Objects of it are missing.
    """
    where = f"{keys.location}/{step_dir}"
    entry, attempt = await _entry(keys, name)
    _, data = _parts_of(entry)
    files = peek_files(data)
    if files is None or attempt_of(data) != attempt:
        raise CorruptCheckpointError(
            f"{keys.location}/{TRASH}/{name} is damaged, so the step cannot be undeleted"
        )
    # The note lets a cleaner end the record of a dead process: this manifest was seen, and is gone.
    later = leases.later_key(step_dir, attempt)
    await keys.put(later, b"-")
    record = await leases.make(keys, step_dir, attempt, seconds, "committing")
    if record is None:
        raise StorageError(
            f"{where}: another process deletes or undeletes it at the moment, or died while it "
            "did. Try again later"
        )
    try:
        there = set(await keys.list(f"{step_dir}/"))
        missing = sorted(files - there - {FILE_NAME})
        if missing:
            raise CorruptCheckpointError(
                f"{where} cannot be undeleted, since objects of it are missing ({len(missing)}): "
                f"{', '.join(missing[:_NAMED_FILES])}"
            )
        await _put_back(keys, step_dir, attempt, data)
    except BaseException:
        await _tidied(keys, record.key, later)
        raise
    try:
        # Removed only now: until here the entry protected the objects.
        await keys.delete_if(f"{TRASH}/{name}", entry.generation)
    except StorageError as error:
        # An entry whose step is back does not count.
        logger.warning("an entry of the trash at %s was left: %s", keys.location, error)
    await _tidied(keys, record.key, later)


async def _tidied(keys: Store, record: str, later: str) -> None:
    """Remove the record and note of an undeletion that has ended; a cleaner removes the rest."""
    try:
        await keys.delete(record)
        # The note goes last: without it, no cleaner could end a record that has stayed.
        await keys.delete(later)
    except StorageError as error:
        logger.warning("a record at %s was left to a cleaner: %s", keys.location, error)


async def _put_back(keys: Store, step_dir: str, attempt: str, data: bytes) -> None:
    """Put a manifest in its place.

    Raises:
        StepExistsError: There is another manifest, or a step of Orbax.
    """
    where, key = f"{keys.location}/{step_dir}", f"{step_dir}/{FILE_NAME}"
    deadline = anyio.current_time() + keys.limits.request_seconds
    found = await not_being_deleted(keys, step_dir, await keys.get(key), deadline)
    if found is None and await is_foreign(keys, step_dir):
        raise undelete_exists(where)
    if found is None or is_gone(found.data):
        await keys.put(f"{NAMES}/{step_dir}.{attempt}", b"-")
        swap = await keys.swap(key, data, None if found is None else found.generation)
        found = await keys.get(key) if swap.generation is None else StoredObject(data, b"")
    if found is None or attempt_of(found.data) != attempt:
        raise undelete_exists(where)


async def purge(keys: Store, name: str, seconds: float) -> None:
    """Remove an entry, and then the objects of its step."""
    try:
        entry, attempt = await _entry(keys, name)
    except StepNotFoundError:
        return
    step_dir = name.removesuffix(f".{attempt}")
    # The record lets a cleaner finish a purge that this process does not finish.
    record = await leases.make(keys, step_dir, attempt, seconds, "deleting")
    if record is None:
        # Another process deletes or undeletes the step.
        return
    await keys.delete_if(f"{TRASH}/{name}", entry.generation)
    _, data = _parts_of(entry)
    manifest = await keys.get(f"{step_dir}/{FILE_NAME}")
    if manifest is None or attempt_of(manifest.data) != attempt:
        kept = frozenset() if manifest is None else peek_files(manifest.data) or frozenset()
        await remove_plain_files(keys, step_dir, StoredObject(data, b""), kept)
    await finish(keys, record)


def _parts_of(entry: StoredObject) -> tuple[int | None, bytes]:
    """Return the time and the manifest of an entry; the time is None if the object is no entry."""
    first, _, data = entry.data.partition(b"\n")
    is_time = first.isdigit() and len(first) < _TIME_DIGITS
    return (int(first) if is_time else None), data


async def _entry(keys: Store, name: str) -> tuple[StoredObject, str]:
    """Return an entry, and the id of its attempt."""
    names = leases.record_names(name)
    found = None if names is None else await keys.get(f"{TRASH}/{name}")
    if names is None or found is None:
        raise undelete_missing(f"{keys.location}/{TRASH}/{name:.200}")
    return found, names[1]
