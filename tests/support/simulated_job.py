"""Jobs of several processes that are none: managers of one process, each with a thread of its own.

What the "processes" share is a dict; everything else is real. So the order of events can be chosen,
and many jobs cost nothing. Real jobs are started by `tests.support.real_jobs`.
"""

from __future__ import annotations

import builtins
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import numpy as np

import ckpt
import ckpt.sync
from ckpt.coordination import OwnDisks

# A time limit far above what it takes to tell the others, and above what a test may take.
FAR = 50.0
STATE = {"a": np.arange(10, dtype=np.int32), "b": 3}
_PATIENCE_S = 120.0


class SharedValues:
    """`KeyValues` of several event loops.

    Attributes:
        broken: What every request raises, or None.
    """

    def __init__(self) -> None:
        self.broken: Exception | None = None
        self._values: dict[str, bytes] = {}
        self._counts: dict[str, int] = {}
        self._guard = threading.Lock()

    async def _asked(self) -> None:
        await anyio.lowlevel.checkpoint()
        if self.broken is not None:
            raise self.broken

    async def put(self, key: str, value: bytes) -> bool:
        await self._asked()
        with self._guard:
            if key in self._values:
                return False
            self._values[key] = bytes(value)
            return True

    async def wait(self, key: str, seconds: float) -> bytes | None:
        end = time.monotonic() + seconds
        while True:
            await self._asked()
            with self._guard:
                if key in self._values:
                    return self._values[key]
            if time.monotonic() >= end:
                return None
            await anyio.sleep(0.002)

    async def list(self, folder: str) -> dict[str, bytes]:
        await self._asked()
        start = f"{folder}/"
        with self._guard:
            found = dict(self._values)
        return {
            key.removeprefix(start): each for key, each in found.items() if key.startswith(start)
        }

    async def add(self, key: str) -> int:
        await self._asked()
        with self._guard:
            self._counts[key] = self._counts.get(key, 0) + 1
            return self._counts[key]

    async def drop(self, folder: str) -> None:
        await self._asked()
        with self._guard:
            for each in (self._values, self._counts):
                for key in [key for key in each if key.startswith(f"{folder}/")]:
                    del each[key]

    @property
    def names(self) -> builtins.list[str]:
        with self._guard:
            return sorted({*self._values, *self._counts})

    async def touch(self, key: str, value: bytes) -> None:
        await self._asked()
        with self._guard:
            self._values[key] = bytes(value)


class Believed:
    """One process of a make-believe job."""

    def __init__(self, index: int, count: int, values: SharedValues) -> None:
        self.process_index = index
        self.process_count = count
        self._values = values

    def key_values(self) -> SharedValues:
        return self._values


def coordinators(count: int, *, own_disks: bool = False) -> list[Any]:
    values = SharedValues()
    jobs = [Believed(index, count, values) for index in range(count)]
    return [OwnDisks(job) for job in jobs] if own_disks else list(jobs)


def managers(
    root: Path,
    count: int = 2,
    *,
    jobs: list[Any] | None = None,
    own_disks: bool = False,
    seconds: float = 4.0,
    each: Sequence[Mapping[str, Any]] = (),
    **options: Any,
) -> list[ckpt.sync.CheckpointManager]:
    """Return a manager of each process; `each` are options of one process each."""
    return [
        ckpt.sync.CheckpointManager(
            root / str(index) if own_disks else root,
            coordinator=job,
            timeouts=ckpt.Timeouts(coordination=seconds),
            **(options | dict(each[index] if each else {})),
        )
        for index, job in enumerate(jobs or coordinators(count, own_disks=own_disks))
    ]


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Make calls at the same time, each in a thread; return what they gave, or raised."""

    def made(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(made, calls))


def steps(found: list[Any]) -> list[int]:
    """Return the steps that were saved; raise what was raised instead, which has a step, too."""
    for each in found:
        if isinstance(each, Exception):
            raise each
    return [each.step for each in found]


def saved(mgrs: Sequence[Any], step: int, *states: Any, **options: Any) -> list[Any]:
    """Save in all processes: each its own state where there are several, else the same."""
    each = states if len(states) > 1 else [*states, STATE][:1] * len(mgrs)
    pairs = zip(mgrs, each, strict=True)
    return together(
        *(lambda m=m, s=s: m.save(step, s, **options).result(_PATIENCE_S) for m, s in pairs)
    )


def closed(mgrs: Sequence[Any]) -> None:
    together(*(mgr.close for mgr in mgrs))


def kinds(found: Sequence[Any]) -> list[type]:
    return [type(each) for each in found]


def storage_of(mgr: Any) -> Any:
    return mgr._service.storage
