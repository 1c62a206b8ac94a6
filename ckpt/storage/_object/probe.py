"""The probe: does a store heed the conditions of writes, on which every commit relies?"""

from __future__ import annotations

import errno
import uuid

from ckpt.errors import StorageError
from ckpt.storage._store import Store, refuse_missing

FOLDER = ".ckpt-probe"


async def probe(keys: Store) -> None:
    """Write an object several times with conditions that do not hold, then remove it.

    Raises:
        StorageError: The store ignores the conditions, or failed.
    """
    key = f"{FOLDER}/{uuid.uuid4().hex}"
    first = await keys.swap(key, f"1 {key}".encode(), None)
    if first.generation is None:
        await refuse_missing(keys)
        raise _broken(keys, "says that a new object exists")
    try:
        again = await keys.swap(key, f"2 {key}".encode(), None)
        if again.generation is not None:
            await _refuse_no_store(keys, key)
            raise _broken(keys, "replaces an object that may only be made if none exists")
        stale = await keys.swap(key, f"3 {key}".encode(), _another(first.generation))
        if stale.generation is not None:
            raise _broken(keys, "replaces an object that another client has changed")
    finally:
        await keys.delete(key)


async def _refuse_no_store(keys: Store, key: str) -> None:
    """Raise if the object was not written: many servers say yes to every request."""
    found = await keys.get(key)
    if found is None or not found.data.endswith(f" {key}".encode()):
        raise StorageError(
            f"{keys.location}: the server says that it has written an object, but does not have "
            "it, so it is not a store. Check the endpoint",
            errno=errno.EREMOTE,
        )


def _broken(keys: Store, what: str) -> StorageError:
    return StorageError(
        f"{keys.location}: the store {what}: it ignores the conditions of writes "
        "(If-None-Match, If-Match), so of two writers of a step one could destroy the other's. "
        "Update the store, use another one, or, if there is only ever one writer here, say so with "
        "single_writer=True of ckpt.storage.S3 or GCS"
    )


def _another(generation: bytes) -> bytes:
    """Return a generation that looks like this one and differs from it."""
    place = len(generation) // 2
    byte = generation[place]
    return generation[:place] + (b"0" if byte != ord("0") else b"1") + generation[place + 1 :]
