"""Lease records: the writers of attempts in an object store, and which of them are dead.

An attempt has a record, a small object beside the step directories. Every change of a record is a
conditional write, so if two processes want to change it, exactly one does:

    writing      its writer puts data. Renewed by the writer; a cleaner may seal it.
    committing   its writer is about to put the manifest. No other process may remove anything,
                 unless the manifest was seen and is gone again: then a cleaner may seal it.
    dead         sealed: the manifest will never be put. Its data may be removed.
    deleting     its step is being deleted. Only made if there is no record, so never while the
                 writer does not know yet whether its manifest was written.

The store's clock cannot be read, so the age of a record is the time for which this process has seen
it unchanged. The record is at least that old. docs/design/006-object-stores.md has the rule and the
proof.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import time
import uuid
from typing import Literal, get_args

import anyio
from msgspec import Struct, field

from ckpt._settings import LONGEST_LEASE_SECONDS
from ckpt.errors import StorageError
from ckpt.storage._base import owner_of, time_in
from ckpt.storage._store import Store, StoredObject

State = Literal["writing", "committing", "dead", "deleting"]

FOLDER = ".ckpt-attempts"
# Suffix of the note that data is to be removed once its record is gone.
LATER = ".later"
_KEY = re.compile(r"^(.+)\.([0-9a-f]{32})\Z", re.DOTALL)


def record_key(step_dir: str, attempt: str) -> str:
    return f"{FOLDER}/{step_dir}.{attempt}"


def later_key(step_dir: str, attempt: str) -> str:
    """Return the key of the note that the data of an attempt is to be removed later."""
    return record_key(step_dir, attempt) + LATER


def record_names(name: str) -> tuple[str, str] | None:
    """Return step directory and attempt id from the name of a record; None for another name."""
    found = _KEY.match(name)
    return None if found is None else (found[1], found[2])


class LeaseRecord(Struct):
    """The record of an attempt, as this process wrote it last.

    Attributes:
        seconds: Duration of the lease after a renewal.
        generation: Generation of the object, which every write changes.
        begun: Time at which its writer made it, by that writer's clock; None if unknown.
        renewed: Time of the last write, by the clock of the process that wrote; None if unknown.
        owner: Host and process that wrote it last, for people.
        guard: Lock that is held during a change.
    """

    key: str
    seconds: float
    state: State
    generation: bytes
    begun: float | None = None
    renewed: float | None = None
    owner: str = ""
    guard: anyio.Lock = field(default_factory=anyio.Lock)

    @property
    def step_dir(self) -> str:
        return self._names[0]

    @property
    def attempt(self) -> str:
        return self._names[1]

    @property
    def _names(self) -> tuple[str, str]:
        names = record_names(self.key.removeprefix(f"{FOLDER}/"))
        assert names is not None
        return names

    async def renew(self, keys: Store) -> bool:
        """Write the record again if its attempt is still being written; False as for `change`."""
        async with self.guard:
            # Its writer may have changed the state meanwhile.
            return self.state != "writing" or await self._change(keys, "writing")

    async def change(self, keys: Store, state: State) -> bool:
        """Write the record again, as its writer; False if another process ended or removed it.

        Raises:
            StorageError: The store failed, or it is unknown whether it was written.
        """
        async with self.guard:
            return await self._change(keys, state)

    async def _change(self, keys: Store, state: State) -> bool:
        while not await self._swap(keys, state):
            now = await self._now(keys)
            if now is None or now.state not in ("writing", "committing"):
                return False
            # Only its writer writes these states, so the answer to an earlier change was lost.
            if now.generation == self.generation:
                return False
            self.generation = now.generation
        return True

    async def _swap(self, keys: Store, state: State) -> bool:
        content = _content(state, self.seconds, self.begun)
        swap = await keys.swap(self.key, content, self.generation)
        if swap.generation is None:
            return False
        self.generation, self.state = swap.generation, state
        return True

    async def _now(self, keys: Store) -> LeaseRecord | None:
        found = await keys.get(self.key)
        return None if found is None else state_of(self.key, found)

    async def seize(self, keys: Store) -> bool:
        """Mark the record as dead, as a cleaner; False if it was changed since it was read.

        Raises:
            StorageError: As `change`.
        """
        async with self.guard:
            return await self._swap(keys, "dead")

    async def seal(self, keys: Store) -> bool:
        """Mark the record as dead, as its writer; False if its data must stay nevertheless.

        Raises:
            StorageError: As `change`.
        """
        if await self.change(keys, "dead"):
            return True
        if self.state != "writing":
            return False
        # A cleaner was quicker, and does not see data written after it. This writer was never about
        # to put a manifest, and has lost the right to, so it may remove the data.
        now = await self._now(keys)
        return now is None or now.state == "dead"


async def make(
    keys: Store, step_dir: str, attempt: str, seconds: float, state: State
) -> LeaseRecord | None:
    """Make the record of an attempt; None if there is one already.

    Raises:
        StorageError: The store failed, or it is unknown whether it was written.
    """
    key, begun = record_key(step_dir, attempt), time.time()
    swap = await keys.swap(key, _content(state, seconds, begun), None)
    if swap.generation is None:
        return None
    return LeaseRecord(key, seconds, state, swap.generation, begun)


def _content(state: State, seconds: float, begun: float | None) -> bytes:
    # The nonce makes each content new: some stores know versions of an object by its bytes alone.
    people = {"host": platform.node(), "pid": os.getpid(), "begun": begun, "renewed": time.time()}
    content = {"state": state, "seconds": seconds, "nonce": uuid.uuid4().hex}
    return json.dumps(content | people).encode()


def state_of(key: str, found: StoredObject) -> LeaseRecord | None:
    """Return the record that an object holds; None if it does not hold one."""
    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(found.data)
        if isinstance(content, dict) and content.get("state") in get_args(State):
            seconds = content.get("seconds")
            if isinstance(seconds, int | float) and not isinstance(seconds, bool):
                lasts = max(0.0, min(seconds, LONGEST_LEASE_SECONDS))
                begun, renewed = time_in(content, "begun"), time_in(content, "renewed")
                owner, state = owner_of(content), content["state"]
                return LeaseRecord(key, lasts, state, found.generation, begun, renewed, owner)
    return None


class Sightings:
    """The times for which objects were seen unchanged, by the clock of this process, in seconds.

    Attributes:
        may_see_probes: True if there may be probes of dead processes. A sweep looks for them until
            there are none.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[bytes, float]] = {}
        self.may_see_probes = True

    def age(self, key: str, generation: bytes) -> float:
        """Return for how long an object has been seen with its present generation."""
        now = time.monotonic()
        known = self._seen.get(key)
        if known is None or known[0] != generation:
            self._seen[key] = generation, now
            return 0.0
        return now - known[1]

    def keep(self, folder: str, keys: set[str]) -> None:
        """Forget the objects of a folder that are not among its present keys."""
        start = f"{folder}/"
        for key in [each for each in self._seen if each.startswith(start) and each not in keys]:
            del self._seen[key]


def lost(where: str) -> StorageError:
    """Return the error of a writer whose attempt was taken for dead."""
    return StorageError(
        f"{where}: the attempt was removed by a cleaner, since its lease expired. Save again; if "
        "this machine is slow, raise Timeouts(lease=...)"
    )
