"""The sweep of an object store, which removes the remains of dead writers.

A writer is taken for dead if this process has seen its lease record unchanged for longer than the
lease lasts. The record is sealed before anything is removed, and a writer that is alive after all
loses the race for its own record before it can put a manifest.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable

from ckpt._format.manifest_head import FILE_NAME
from ckpt._runtime.tasks import for_each
from ckpt.storage._base import AttemptEntry
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
from ckpt.storage._store import Store


async def sweep(keys: Store, sightings: Sightings, seconds: float) -> list[str]:
    """Remove the remains of writers that are certainly dead; return the names of their attempts.

    Records that are made for the removal last for `seconds`.
    """
    found = await keys.list(f"{FOLDER}/")
    put_off = {
        name for name in found if name.endswith(LATER) and record_names(name.removesuffix(LATER))
    }
    swept: list[str] = []

    async def look(name: str, record: LeaseRecord, is_dead: bool) -> None:
        if is_dead and await _end(keys, record, was_published=name + LATER in put_off):
            swept.append(name)

    await _look_at(keys, sightings, found, look)
    await for_each(lambda name: finish_later(keys, name, seconds), put_off)
    if sightings.may_see_probes:
        sightings.may_see_probes = await _remove_probes(keys, sightings, seconds)
    return sorted(swept)


async def attempts_in(keys: Store, sightings: Sightings) -> list[AttemptEntry]:
    """Return the attempts that have a record, without changing anything."""
    found: list[AttemptEntry] = []

    async def look(name: str, record: LeaseRecord, is_dead: bool) -> None:
        age, silent = _seconds_since(record.begun), _seconds_since(record.renewed)
        is_live = False if is_dead else None
        # Clocks may differ, so a silent writer is called dead only once its silence was seen here.
        if not is_dead and silent is not None and silent <= record.seconds:
            is_live = True
        found.append(
            AttemptEntry(
                record.step_dir,
                record.attempt,
                is_live,
                age,
                silent,
                owner=record.owner,
                is_removal=record.state in ("dead", "deleting"),
            )
        )

    await _look_at(keys, sightings, await keys.list(f"{FOLDER}/"), look)
    return sorted(found, key=lambda each: (each.step_dir, each.id))


async def _look_at(
    keys: Store,
    sightings: Sightings,
    listed: Iterable[str],
    then: Callable[[str, LeaseRecord, bool], Awaitable[None]],
) -> None:
    """Call `then` with the name of every record, the record, and whether its writer is dead."""
    names = [name for name in listed if record_names(name) is not None]
    sightings.keep(FOLDER, {f"{FOLDER}/{name}" for name in names})

    async def look(name: str) -> None:
        key = f"{FOLDER}/{name}"
        found = await keys.get(key)
        record = None if found is None else state_of(key, found)
        if record is not None:
            is_dead = sightings.age(key, record.generation) > record.seconds
            await then(name, record, is_dead)

    await for_each(look, names)


def _seconds_since(time_s: float | None) -> float | None:
    return None if time_s is None else max(time.time() - time_s, 0.0)


async def _end(keys: Store, record: LeaseRecord, *, was_published: bool) -> bool:
    """End an attempt whose record has expired; False if that must not be done.

    `was_published` is True if its manifest was seen, by a process that deleted or replaced it, or
    was about to.
    """
    if record.state == "committing":
        found = await keys.get(f"{record.step_dir}/{FILE_NAME}")
        is_there = found is not None and attempt_of(found.data) == record.attempt
        if not is_there and not was_published:
            # The manifest may still be written, so nothing can be removed.
            return False
        if not is_there and not await record.seize(keys):
            return False
        # The writer died before it did this.
        await finish_replaced(keys, record.step_dir, record.attempt, record.seconds)
        if is_there:
            await keys.delete(record.key)
            return True
    elif record.state == "writing" and not await record.seize(keys):
        return False
    await finish(keys, record)
    return True


async def _remove_probes(keys: Store, sightings: Sightings, seconds: float) -> bool:
    """Remove probes whose process died; return True if there were any probes."""

    async def look(name: str) -> None:
        key = f"{PROBES}/{name}"
        found = await keys.get(key, 0, 1)
        if found is not None and sightings.age(key, found.generation) > seconds:
            await keys.delete(key)

    names = await keys.list(f"{PROBES}/")
    sightings.keep(PROBES, {f"{PROBES}/{name}" for name in names})
    await for_each(look, names)
    return bool(names)
