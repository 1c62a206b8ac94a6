"""Who writes an attempt of an object store, and whether that is over.

An attempt has a record, a small object of its own, which lies beside the entries. Every change of a
record is a conditional write, so of two who want to change it exactly one does:

    writing      its writer puts data. Renewed by the writer; a cleaner may seal it.
    committing   its writer is about to put the manifest. Nobody else may remove anything, unless
                 that was seen there and has gone: then a cleaner may seal it.
    dead         sealed: nobody will ever put the manifest. Its data may be removed.
    deleting     what it became is being deleted. Made where there is no record, so never while the
                 writer does not know yet what came of its manifest.

The clock of the store is not to be had, so the age of a record is how long this process has itself
seen it unchanged: it is never older than that. docs/design has the rule and the proof.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Literal, get_args

import anyio

from ckpt._settings import LONGEST_LEASE_SECONDS
from ckpt.errors import StorageError
from ckpt.storage._object.client import MISSING, ObjectClient, StoredObject

__all__ = [
    "FOLDER",
    "LATER",
    "LeaseRecord",
    "Sightings",
    "State",
    "later_key",
    "lost",
    "make",
    "record_key",
    "record_names",
    "state_of",
]

State = Literal["writing", "committing", "dead", "deleting"]

FOLDER = ".ckpt-attempts"
# Ends the name of what says that data are to be removed once their record has gone.
LATER = ".later"
_KEY = re.compile(r"^(.+)\.([0-9a-f]{32})\Z", re.DOTALL)


def record_key(entry: str, attempt: str) -> str:
    """Return the key of the record of an attempt."""
    return f"{FOLDER}/{entry}.{attempt}"


def later_key(entry: str, attempt: str) -> str:
    """Return the key of what says that the data of an attempt are to be removed later."""
    return record_key(entry, attempt) + LATER


def record_names(name: str) -> tuple[str, str] | None:
    """Return the entry and the id that the name of a record tells, or None."""
    found = _KEY.match(name)
    return None if found is None else (found[1], found[2])


@dataclass(slots=True)
class LeaseRecord:
    """The record of an attempt, as this process wrote it last.

    Attributes:
        key: Its key.
        seconds: How long it lasts after it was renewed.
        state: Its state.
        generation: That of the object.
        guard: Held while it is changed.
    """

    key: str
    seconds: float
    state: State
    generation: bytes
    guard: anyio.Lock = field(default_factory=anyio.Lock)

    @property
    def entry(self) -> str:
        """Name of the entry."""
        return self._names[0]

    @property
    def attempt(self) -> str:
        """Id of the attempt."""
        return self._names[1]

    @property
    def _names(self) -> tuple[str, str]:
        names = record_names(self.key.removeprefix(f"{FOLDER}/"))
        assert names is not None
        return names

    async def renew(self, keys: ObjectClient) -> bool:
        """Write it anew while its attempt is being written; False as `change`."""
        async with self.guard:
            # Its writer may have gone on meanwhile.
            return self.state != "writing" or await self._change(keys, "writing")

    async def change(self, keys: ObjectClient, state: State) -> bool:
        """Write the record anew, as its writer; False if somebody else has ended or removed it.

        Raises:
            StorageError: The store refused, or it is not known whether it was written.
        """
        async with self.guard:
            return await self._change(keys, state)

    async def _change(self, keys: ObjectClient, state: State) -> bool:
        while not await self._swap(keys, state):
            now = await self._now(keys)
            if now is None or now.state not in ("writing", "committing"):
                return False
            # Nobody but its writer writes these: the answer to an earlier change was lost.
            if now.generation == self.generation:
                return False
            self.generation = now.generation
        return True

    async def _swap(self, keys: ObjectClient, state: State) -> bool:
        swap = await keys.swap(self.key, _content(state, self.seconds), self.generation)
        if swap.generation is None:
            return False
        self.generation, self.state = swap.generation, state
        return True

    async def _now(self, keys: ObjectClient) -> LeaseRecord | None:
        found = await keys.get(self.key)
        return None if found is None else state_of(self.key, found)

    async def seize(self, keys: ObjectClient) -> bool:
        """Write that it is dead, as a cleaner; False if it was changed since it was read.

        Raises:
            StorageError: As `change`.
        """
        async with self.guard:
            return await self._swap(keys, "dead")

    async def seal(self, keys: ObjectClient) -> bool:
        """Write that it is dead, as its writer; False if its data may not be removed all the same.

        Raises:
            StorageError: As `change`.
        """
        if await self.change(keys, "dead"):
            return True
        if self.state != "writing":
            return False
        # A cleaner was quicker, and does not see what came after it. This writer has never been
        # about to put a manifest, and has lost the right to.
        now = await self._now(keys)
        return now is None or now.state == "dead"


async def make(
    keys: ObjectClient, entry: str, attempt: str, seconds: float, state: State
) -> LeaseRecord | None:
    """Make the record of an attempt; None if there is one.

    Raises:
        StorageError: The store refused, or it is not known whether it was written.
    """
    key = record_key(entry, attempt)
    swap = await keys.swap(key, _content(state, seconds), MISSING)
    return None if swap.generation is None else LeaseRecord(key, seconds, state, swap.generation)


def _content(state: State, seconds: float) -> bytes:
    # Unlike all before it: some stores tell versions of an object by its bytes alone.
    people = {"host": platform.node(), "pid": os.getpid()}
    content = {"state": state, "seconds": seconds, "nonce": uuid.uuid4().hex}
    return json.dumps(content | people).encode()


def state_of(key: str, found: StoredObject) -> LeaseRecord | None:
    """Return the record that was found; None of what is none."""
    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(found.data)
        if isinstance(content, dict) and content.get("state") in get_args(State):
            seconds = content.get("seconds")
            if isinstance(seconds, int | float) and not isinstance(seconds, bool):
                lasts = max(0.0, min(seconds, LONGEST_LEASE_SECONDS))
                return LeaseRecord(key, lasts, content["state"], found.generation)
    return None


class Sightings:
    """For how long objects were seen unchanged, by the clock of this process, in seconds.

    Attributes:
        may_see_probes: Whether there may be some that were left; looked for until there are none.
    """

    def __init__(self) -> None:
        """Nothing was seen yet."""
        self._seen: dict[str, tuple[bytes, float]] = {}
        self.may_see_probes = True

    def age(self, key: str, generation: bytes) -> float:
        """Return since when an object has had the generation that it has now."""
        now = time.monotonic()
        known = self._seen.get(key)
        if known is None or known[0] != generation:
            self._seen[key] = generation, now
            return 0.0
        return now - known[1]

    def keep(self, folder: str, keys: set[str]) -> None:
        """Forget what is not among the keys that a folder has now."""
        start = f"{folder}/"
        for key in [each for each in self._seen if each.startswith(start) and each not in keys]:
            del self._seen[key]


def lost(where: str) -> StorageError:
    """Return the error of a writer whose attempt was taken for dead."""
    return StorageError(
        f"{where}: the attempt was removed by a cleaner, since its lease ran out. Save again; if "
        "this machine is slow, raise Timeouts(lease=...)"
    )
