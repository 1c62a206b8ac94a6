"""Removing what dead writers left in an object store.

A writer is taken for dead once its record has stayed the same for longer than it lasts, as this
process has itself seen. It is sealed before anything is removed, and a writer that lives after all
loses the race for its own record before it puts a manifest.
"""

from __future__ import annotations

from ckpt._format.manifest import FILE_NAME
from ckpt.storage._object.client import ObjectClient
from ckpt.storage._object.concurrency import each
from ckpt.storage._object.leases import (
    FOLDER,
    LATER,
    LeaseRecord,
    Sightings,
    record_names,
    state_of,
)
from ckpt.storage._object.names import attempt_of
from ckpt.storage._object.probe import FOLDER as PROBES
from ckpt.storage._object.removal import finish, finish_later, finish_replaced

__all__ = ["sweep"]


async def sweep(keys: ObjectClient, sightings: Sightings, seconds: float) -> list[str]:
    """Remove what provably dead writers left; return the names of their attempts.

    Records that are made for that last for `seconds`.
    """
    found = await keys.list(f"{FOLDER}/")
    names = [name for name in found if record_names(name) is not None]
    put_off = {
        name for name in found if name.endswith(LATER) and record_names(name.removesuffix(LATER))
    }
    sightings.keep(FOLDER, {f"{FOLDER}/{name}" for name in names})
    swept: list[str] = []

    async def look(name: str) -> None:
        key = f"{FOLDER}/{name}"
        found = await keys.get(key)
        record = None if found is None else state_of(key, found)
        if record is None or sightings.age(key, record.generation) <= record.seconds:
            return
        if await _end(keys, record, was_published=name + LATER in put_off):
            swept.append(name)

    await each(look, names)
    await each(lambda name: finish_later(keys, name, seconds), put_off)
    if sightings.may_see_probes:
        sightings.may_see_probes = await _remove_probes(keys, sightings, seconds)
    return sorted(swept)


async def _end(keys: ObjectClient, record: LeaseRecord, *, was_published: bool) -> bool:
    """End an attempt whose record has run out; False if that must not be done.

    `was_published` says that its manifest was seen by who has deleted or replaced it since, or was
    about to.
    """
    if record.state == "committing":
        found = await keys.get(f"{record.entry}/{FILE_NAME}")
        is_there = found is not None and attempt_of(found.data) == record.attempt
        if not is_there and not was_published:
            # Its manifest may still come, so nothing can go.
            return False
        if not is_there and not await record.seize(keys):
            return False
        # Its writer has not come to do that.
        await finish_replaced(keys, record.entry, record.attempt, record.seconds)
        if is_there:
            await keys.delete(record.key)
            return True
    elif record.state == "writing" and not await record.seize(keys):
        return False
    await finish(keys, record)
    return True


async def _remove_probes(keys: ObjectClient, sightings: Sightings, seconds: float) -> bool:
    """Remove what was left of probes whose process died; tell whether there are any."""

    async def look(name: str) -> None:
        key = f"{PROBES}/{name}"
        found = await keys.first(key)
        if found is not None and sightings.age(key, found.generation) > seconds:
            await keys.delete(key)

    names = await keys.list(f"{PROBES}/")
    sightings.keep(PROBES, {f"{PROBES}/{name}" for name in names})
    await each(look, names)
    return bool(names)
