"""Attempts in an object store: published, or given up.

The manifest of an entry is the only object that anybody overwrites, always on the condition that it
is still what was read. All else lies below the id of its attempt, so that no two writers meet. The
order of these operations, and why they are safe, is docs/design/006-object-stores.md.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import anyio

from ckpt._format.manifest import FILE_NAME
from ckpt.errors import StepDeletedError, StepExistsError, StorageError
from ckpt.storage._object import leases
from ckpt.storage._object.client import MISSING, ObjectClient, StoredObject
from ckpt.storage._object.concurrency import each
from ckpt.storage._object.errors import RequestFailed
from ckpt.storage._object.leases import LeaseRecord
from ckpt.storage._object.names import (
    NAMES,
    attempt_of,
    deleter_of,
    is_gone,
)
from ckpt.storage._object.removal import remove_data

__all__ = ["ObjectAttempt", "discard", "publish"]

logger = logging.getLogger("ckpt")

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 2.0


@dataclass(slots=True)
class ObjectAttempt:
    """One try at writing an entry.

    Attributes:
        entry: Name of the entry it will become.
        id: Random hexadecimal id.
        record: Says that it is being written; None where another process does.
        manifest: The manifest, once it is known.
        abandoned: Whether a write was given up that the store may still carry out.
        keep: Whether nobody knows if it was published: nothing of it may be removed.
    """

    entry: str
    id: str
    record: LeaseRecord | None
    manifest: bytes | None = None
    abandoned: bool = False
    keep: bool = False

    @property
    def folder(self) -> str:
        """Folder of the entry in which its files lie."""
        return self.id

    def key(self, path: str) -> str:
        """Return the key of a file."""
        return f"{self.entry}/{self.id}/{path}"


async def publish(
    keys: ObjectClient, attempt: ObjectAttempt, *, overwrite: bool, replacing: str | None
) -> StoredObject | None:
    """Put the manifest of an attempt; return what it replaced.

    Raises:
        StepExistsError: The entry exists, and is not to be replaced.
        StepDeletedError: What `replacing` became is not there any more.
        StorageError: The store refused. `attempt.keep` tells whether it may have been published.
    """
    record, data = attempt.record, attempt.manifest
    where = f"{keys.location}/{attempt.entry}"
    if record is None or data is None:
        raise StorageError(
            f"{where}: an attempt is published once, by whoever began it, after its {FILE_NAME}"
        )
    await _announce(keys, attempt, record)
    key = f"{attempt.entry}/{FILE_NAME}"
    deadline = anyio.current_time() + keys.seconds
    # Looked at first where something is to be replaced: of what nobody has seen before, nobody
    # could say whether it came before a write whose answer was lost, or after it.
    found = await keys.get(key) if overwrite or replacing is not None else None
    if replacing is None:
        found = await _not_being_deleted(keys, attempt.entry, found, deadline)
    while True:
        if replacing is not None and (found is None or attempt_of(found.data) != replacing):
            raise StepDeletedError(
                f"{where} was deleted or replaced, or cannot be read any more, so what was made of "
                "it did not take its place. Look at what is there now, and try again"
            )
        expected = MISSING if found is None else found.generation
        try:
            swap = await keys.swap(key, data, expected)
        except StorageError as error:
            surely_not = isinstance(error, RequestFailed)
            # An earlier try may still come true.
            attempt.keep = attempt.keep or not surely_not
            if attempt.keep:
                raise _unknown(where, error) from error
            raise
        if swap.generation is not None:
            return found
        # Later it could still come true, and then it must find its data.
        attempt.keep = attempt.keep or swap.abandoned
        if swap.doubtful and (overwrite or replacing is not None):
            raise StorageError(
                f"{where}: another writer's checkpoint is there now. This one may have been there "
                "before; save again if it is to take its place"
            )
        found = await keys.get(key)
        if replacing is None:
            found = await _not_being_deleted(keys, attempt.entry, found, deadline)
            if found is not None and found.data == data:
                # An earlier try has come true; if anything, it has replaced a tombstone.
                return None
            if found is not None and not is_gone(found.data) and not overwrite:
                raise StepExistsError(
                    f"{where} already exists; it was left as it is. Choose another step, or pass "
                    "overwrite=True to replace it"
                )


async def _not_being_deleted(
    keys: ObjectClient, entry: str, found: StoredObject | None, deadline: float
) -> StoredObject | None:
    """Wait until nobody removes the tombstone that lies in place of a manifest; return what does.

    That is the tombstone itself if it was left, or takes too long.
    """
    pause = _FIRST_PAUSE_SECONDS
    while found is not None and is_gone(found.data) and anyio.current_time() < deadline:
        deleter = deleter_of(found.data)
        if deleter is None or await keys.get(leases.record_key(entry, deleter)) is None:
            return found
        await anyio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        found = await keys.get(f"{entry}/{FILE_NAME}")
    return found


async def _announce(keys: ObjectClient, attempt: ObjectAttempt, record: LeaseRecord) -> None:
    """Write the name of the entry where lists look, and win the right to commit."""
    name = f"{NAMES}/{attempt.entry}.{attempt.id}"
    is_ours = False

    async def write_name() -> None:
        try:
            await keys.put(name, b"-")
        except RequestFailed as error:
            attempt.abandoned = attempt.abandoned or error.is_under_way
            raise

    async def win() -> None:
        nonlocal is_ours
        is_ours = await record.change(keys, "committing")

    await each(lambda act: act(), (write_name, win))
    if not is_ours:
        # Whoever removed the attempt may have been here before the name.
        await keys.delete(name)
        raise leases.lost(f"{keys.location}/{attempt.entry}")


def _unknown(where: str, error: StorageError) -> StorageError:
    return StorageError(
        f"{where}: nobody knows whether the checkpoint was committed: {error.message}. It is whole "
        "if it is there, so look for it once the store answers again; its data were left",
        errno=error.errno,
    )


async def discard(keys: ObjectClient, attempt: ObjectAttempt) -> None:
    """Remove what was written of an attempt that was not published.

    Raises:
        StorageError: The store refused; a later sweep removes the rest.
    """
    record = attempt.record
    if record is None:
        return
    if attempt.keep:
        logger.warning("%s/%s/%s was left", keys.location, attempt.entry, attempt.id)
        return
    # Sealed first, so that a cleaner can finish what this process cannot.
    if await record.seal(keys):
        await remove_data(keys, attempt.entry, attempt.id)
        # What still comes is removed by a cleaner, who needs the record for that.
        if not attempt.abandoned:
            await keys.delete(record.key)
