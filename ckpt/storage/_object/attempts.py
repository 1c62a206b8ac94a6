"""Attempts in an object store: published, or discarded.

The manifest of a step directory is the only object that is ever overwritten, always on the
condition that it is still the one that was read. All other objects have the id of their attempt in
their keys, so no two writers use the same ones. docs/design/006-object-stores.md explains the order
of these operations and why they are safe.
"""

from __future__ import annotations

import logging

import anyio
from msgspec import Struct

from ckpt._format.manifest_head import FILE_NAME
from ckpt._runtime.futures import for_each
from ckpt.errors import StepDeletedError, StepExistsError, StorageError
from ckpt.storage._object import leases
from ckpt.storage._object.errors import RequestFailed
from ckpt.storage._object.leases import LeaseRecord
from ckpt.storage._object.listing import NAMES, attempt_of, deleter_of, is_gone
from ckpt.storage._object.removal import remove_data
from ckpt.storage._store import Store, StoredObject

logger = logging.getLogger("ckpt")

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 2.0


class ObjectAttempt(Struct):
    """One try at writing a step directory.

    Attributes:
        step_dir: Name of the step directory it will become.
        record: Its lease record; None if another process has the record.
        manifest: Bytes of the manifest, once it was written.
        abandoned: True if the store may still carry out a write that was given up.
        keep: True if it may have been published, so that nothing of it may be removed.
        copies_failed: True if a copy into it has failed, so that no more are tried.
    """

    step_dir: str
    id: str
    record: LeaseRecord | None
    manifest: bytes | None = None
    abandoned: bool = False
    keep: bool = False
    copies_failed: bool = False

    @property
    def folder(self) -> str:
        """Folder of the step directory that holds its files."""
        return self.id

    def key(self, path: str) -> str:
        return f"{self.step_dir}/{self.id}/{path}"


async def publish(
    keys: Store, attempt: ObjectAttempt, *, overwrite: bool, replacing: str | None
) -> StoredObject | None:
    """Put the manifest of an attempt; return the object that it replaced.

    Raises:
        StepExistsError: The step directory exists, and may not be replaced.
        StepDeletedError: The step directory of `replacing` is gone.
        StorageError: The store failed. `attempt.keep` says whether it may have been published.
    """
    record, data = attempt.record, attempt.manifest
    where = f"{keys.location}/{attempt.step_dir}"
    if record is None or data is None:
        raise StorageError(
            f"{where}: an attempt is published once, by the process that began it, after its "
            f"{FILE_NAME} was written"
        )
    await _announce(keys, attempt, record)
    key = f"{attempt.step_dir}/{FILE_NAME}"
    deadline = anyio.current_time() + keys.limits.request_seconds
    # An object to be replaced is read first. Otherwise, if the answer to the write is lost, nobody
    # could tell whether a manifest found there came before the write or after it.
    found = await keys.get(key) if overwrite or replacing is not None else None
    if replacing is None:
        found = await not_being_deleted(keys, attempt.step_dir, found, deadline)
    while True:
        if replacing is not None and (found is None or attempt_of(found.data) != replacing):
            raise StepDeletedError(
                f"{where} was deleted or replaced meanwhile, or cannot be read any more, so it was "
                "not changed. Look at what is there now, and try again"
            )
        expected = None if found is None else found.generation
        try:
            swap = await keys.swap(key, data, expected)
        except StorageError as error:
            surely_not = isinstance(error, RequestFailed)
            # The store may still carry out an earlier try.
            attempt.keep = attempt.keep or not surely_not
            if attempt.keep:
                raise _unknown(where, error) from error
            raise
        if swap.generation is not None:
            return found
        # The store may still carry out an abandoned write, and then its data must exist.
        attempt.keep = attempt.keep or swap.abandoned
        if swap.doubtful and (overwrite or replacing is not None):
            raise StorageError(
                f"{where}: another writer's checkpoint is there now. This one may have been there "
                "before; save again if it is to take its place"
            )
        found = await keys.get(key)
        if replacing is None:
            found = await not_being_deleted(keys, attempt.step_dir, found, deadline)
            if found is not None and found.data == data:
                # An earlier try was carried out after all. At most it has replaced a tombstone.
                return None
            if found is not None and not is_gone(found.data) and not overwrite:
                raise StepExistsError(
                    f"{where} already exists and was not changed. Choose another step, or pass "
                    "if_exists='replace' to replace it"
                )


async def not_being_deleted(
    keys: Store, step_dir: str, found: StoredObject | None, deadline: float
) -> StoredObject | None:
    """Wait while a live process removes a tombstone; return the object in the manifest's place.

    It is the tombstone itself if that process is dead, or takes too long.
    """
    pause = _FIRST_PAUSE_SECONDS
    while found is not None and is_gone(found.data) and anyio.current_time() < deadline:
        deleter = deleter_of(found.data)
        if deleter is None or await keys.get(leases.record_key(step_dir, deleter)) is None:
            return found
        await anyio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        found = await keys.get(f"{step_dir}/{FILE_NAME}")
    return found


async def _announce(keys: Store, attempt: ObjectAttempt, record: LeaseRecord) -> None:
    """Write the name of the step directory for lists, and win the right to commit."""
    name = f"{NAMES}/{attempt.step_dir}.{attempt.id}"
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

    await for_each(lambda act: act(), (write_name, win))
    if not is_ours:
        # The cleaner that removed the attempt may not have seen its name.
        await keys.delete(name)
        raise leases.lost(f"{keys.location}/{attempt.step_dir}")


def _unknown(where: str, error: StorageError) -> StorageError:
    return StorageError(
        f"{where}: it is unknown whether the checkpoint was committed: {error.message}. If it is "
        "there, it is complete, so look for it once the store answers again; its data was kept",
        errno=error.errno,
    )


async def discard(keys: Store, attempt: ObjectAttempt) -> None:
    """Remove the data of an attempt that was not published.

    Raises:
        StorageError: The store failed; a later sweep removes the rest.
    """
    record = attempt.record
    if record is None:
        return
    if attempt.keep:
        logger.warning("%s/%s/%s was kept", keys.location, attempt.step_dir, attempt.id)
        return
    # Sealed first, so that a cleaner can finish what this process does not finish.
    if await record.seal(keys):
        await remove_data(keys, attempt.step_dir, attempt.id)
        # Data may still be written late. A cleaner removes it, and needs the record for that.
        if not attempt.abandoned:
            await keys.delete(record.key)
