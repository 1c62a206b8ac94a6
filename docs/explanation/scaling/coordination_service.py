"""A simulation of what it takes the processes of a job to agree: real code, in made-up time.

Each process is a task with `Peers` of its own. What they share is a queue: one request after the
other takes the time that was measured of the coordination service of jax. No process is started,
and nothing is sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, cast

import anyio
import msgspec

from ckpt._job.agreement.operation import concluded, gathered, together
from ckpt._job.agreement.peers import Peers
from ckpt._job.processes import SeparateRoots
from ckpt._steps.index import IndexedStep
from ckpt._steps.opened import OpenedStep
from ckpt._tiers.peers.parts import Inventory, SnapshotPart, recovery_of
from ckpt._tiers.peers.wire import new_key
from ckpt.coordination import OwnDisks
from ckpt.coordination._jax_service import split
from tests.support.virtual_time import in_made_up_time

__all__ = [
    "RATE",
    "TAKES",
    "TELLS",
    "TRIP",
    "Talk",
    "exchanges",
    "from_memory",
    "from_root",
    "rounds",
]

# Measured; docs/explanation/scaling.md says how.
RATE = 8900.0
TAKES = 155e6
TRIP = 0.0005
# A MiB in 25 ms, all that have waited for it one after the other: docs/design/005-coordination.md.
TELLS = 2**20 / 0.025

_SECONDS = 60.0
# As large as those of a real save.
_SAVE = "0123456789abcdef" * 2
_STEPS = (990, 1000)


class Talk(NamedTuple):
    """What all processes of a job have said to each other.

    Attributes:
        seconds: Until the last of them is done.
        requests: To the service.
        told: Bytes that it was given.
        heard: Bytes that it has given.
    """

    seconds: float
    requests: float
    told: float
    heard: float


class _Service:
    """`KeyValues` that answer one request after the other."""

    def __init__(self) -> None:
        self.requests, self.told, self.heard = 0, 0, 0
        self._free_at = 0.0
        self._values: dict[str, bytes] = {}
        self._sizes: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._waiting: dict[str, anyio.Event] = {}

    async def put(self, key: str, value: bytes) -> bool:
        size = await self._take(key, value)
        if key in self._values:
            return False
        self._set(key, value, size)
        return True

    async def touch(self, key: str, value: bytes) -> None:
        self._set(key, value, await self._take(key, value))

    async def wait(self, key: str, seconds: float) -> bytes | None:
        await self._asked(len(key))
        with anyio.move_on_after(max(seconds, 0)):
            while key not in self._values:
                await self._waiting.setdefault(key, anyio.Event()).wait()
        if key not in self._values:
            return None
        await self._answers(self._sizes[key])
        return self._values[key]

    async def list(self, folder: str) -> dict[str, bytes]:
        await self._asked(len(folder))
        start = f"{folder}/"
        found = {key: value for key, value in self._values.items() if key.startswith(start)}
        await self._answers(sum(len(key) + self._sizes[key] for key in found))
        return {key.removeprefix(start): value for key, value in found.items()}

    async def add(self, key: str) -> int:
        await self._asked(len(key))
        self._counts[key] = self._counts.get(key, 0) + 1
        return self._counts[key]

    async def drop(self, folder: str) -> None:
        await self._asked(len(folder))
        for each in (self._values, self._counts):
            for key in [key for key in each if key.startswith(f"{folder}/")]:
                del each[key]

    async def _take(self, key: str, value: bytes) -> int:
        head, parts = split(value)
        size = len(head) + sum(len(part) for _, part in parts)
        await self._asked(len(key) + size)
        return size

    async def _asked(self, nbytes: int) -> None:
        self.requests += 1
        self.told += nbytes
        await self._work(1 / RATE + nbytes / TAKES)

    async def _answers(self, nbytes: int) -> None:
        self.heard += nbytes
        await self._work(nbytes / TELLS)

    async def _work(self, seconds: float) -> None:
        self._free_at = max(self._free_at, anyio.current_time()) + seconds
        await anyio.sleep_until(self._free_at + TRIP / 2)

    def _set(self, key: str, value: bytes, size: int) -> None:
        self._values[key], self._sizes[key] = value, size
        if key in self._waiting:
            self._waiting.pop(key).set()


class _Job:
    def __init__(self, index: int, count: int, values: _Service) -> None:
        self.process_index, self.process_count = index, count
        self._values = values

    def key_values(self) -> Any:
        return self._values


def _talk(hosts: int, say: Callable[[_Job], Coroutine[Any, Any, None]]) -> Talk:
    async def main() -> Talk:
        service = _Service()
        began = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for index in range(hosts):
                tasks.start_soon(say, _Job(index, hosts, service))
        took = anyio.current_time() - began
        return Talk(took, service.requests, service.told, service.heard)

    return in_made_up_time(main)


def from_root(hosts: int, handed: bytes) -> Talk:
    """Returns what opening a root and restoring a step takes.

    Args:
        hosts: Processes.
        handed: The manifest, if process 0 hands it on.
    """

    async def say(job: _Job) -> None:
        peers = _peers(job)
        async with peers.all_of("restore", "the restore") as operation:
            about = json.dumps({"step": 1000, "attempt": _SAVE, "broadcast": None}).encode()
            await operation.lead(about + b"\n" + handed if peers.index == 0 else None)

    return _talk(hosts, say)


def from_memory(hosts: int) -> Talk:
    """Returns what opening the memory, saying what is in it, and restoring a step takes.

    Each process says where it can be reached, and which steps it has of its own part and of the
    copy.
    """

    async def say(job: _Job) -> None:
        peers = _peers(OwnDisks(job))
        roots = SeparateRoots(peers, cast("Any", _Index()))
        await roots.everywhere("memory", 0, "opening memory", _nothing)
        address = f"10.0.{peers.index // 256}.{peers.index % 256}"
        parts = tuple(
            SnapshotPart(part, step, _SAVE, part == peers.index)
            for part in (peers.index, (peers.index - 1) % hosts)
            for step in _STEPS
        )
        # As `PeerReplication` does it.
        async with peers.all_of("peers", "what is in memory") as operation:
            key = json.dumps({"id": _SAVE, "key": new_key()}).encode()
            await operation.lead(key if peers.index == 0 else None)
            await job.key_values().touch(f"parts/{peers.index}", json.dumps([address, 1]).encode())
            own = msgspec.to_builtins(Inventory(f"machine {peers.index}", address, "", parts))
            await concluded(operation, own, "inventories", _planned)
            await gathered(operation, "", "fetched")
        async with roots.restoring(None, None, None, cast("Any", None), None):
            pass

    return _talk(hosts, say)


def rounds(hosts: int) -> Talk:
    """Returns what it takes all to say that they have a copy, and to hear that all have."""

    def of(count: int) -> Talk:
        async def say(job: _Job) -> None:
            peers = _peers(OwnDisks(job))
            for number in range(count):
                async with peers.all_of(f"copies-{number}", "copying a snapshot") as operation:
                    await operation.lead(b"{}" if peers.index == 0 else None)
                    await job.key_values().wait(f"parts/{number}/{peers.index}", 0)
                    await gathered(operation, "", "copied")

        return _talk(hosts, say)

    return _difference(of)


def exchanges(hosts: int) -> Talk:
    """Returns what a round of a restore with `broadcast_bytes` takes."""

    def of(count: int) -> Talk:
        async def say(job: _Job) -> None:
            async with _peers(job).all_of("restore", "the restore") as operation:
                for number in range(count):
                    async with together(operation.part(f"share-0-{number}")):
                        pass

        return _talk(hosts, say)

    return _difference(of)


def _difference(of: Callable[[int], Talk]) -> Talk:
    """Returns what one round of several takes, without what comes before and after them."""
    few, many = of(1), of(3)
    return Talk(*((more - less) / 2 for less, more in zip(few, many, strict=True)))


def _peers(job: Any) -> Peers:
    return Peers(job, _SECONDS, "gs://bucket/run", 4 << 30)


class _Index:
    """Two steps, the same on all processes."""

    location = "/dev/shm/run"

    async def refresh(self) -> dict[int, IndexedStep]:
        return {
            step: IndexedStep(step, str(step), _SAVE, 0, 0, None, save=_SAVE) for step in _STEPS
        }

    async def found(self, step: int | None) -> OpenedStep:
        return OpenedStep(cast("Any", None), str(step), cast("Any", None))


def _planned(every: Sequence[Any]) -> Any:
    """Returns what the primary makes of what all have."""
    found = recovery_of([msgspec.convert(each, Inventory) for each in every])
    return msgspec.to_builtins(found, str_keys=True)


async def _nothing() -> None:
    pass
