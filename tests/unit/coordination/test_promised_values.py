"""What a coordinator of one's own has to offer, and what the built-in ones do."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import anyio

from ckpt.coordination import Coordinator, KeyValues, OwnDisks
from ckpt.testing.coordination import MemoryKeyValues
from tests.support.simulated_job import FAR, STATE, Believed, SharedValues, closed, managers, saved


class Noted:
    """Passes everything on, and notes which calls there were."""

    def __init__(self, inner: Any, asked: set[str]) -> None:
        self._inner, self._asked, self._guard = inner, asked, threading.Lock()
        self.has_listed = threading.Event()
        # Attributes of its own: a protocol asks no `__getattr__` from Python 3.12 on.
        for name in dir(inner):
            if not name.startswith("_"):
                setattr(self, name, self._noting(name, getattr(inner, name)))

    def _noting(self, name: str, found: Any) -> Any:
        if not callable(found):
            return found

        def call(*args: Any) -> Any:
            with self._guard:
                self._asked.add(name)
            if name == "list":
                self.has_listed.set()
            return found(*args)

        return call


def test_values_that_processes_share() -> None:
    async def main() -> None:
        values: KeyValues = MemoryKeyValues()
        assert await values.put("a/x", b"1")
        assert not await values.put("a/x", b"2")
        await values.touch("a/y", b"3")
        await values.touch("a/y", b"4")
        assert await values.wait("a/x", 0) == b"1"
        assert await values.wait("a/none", 0) is None
        assert await values.list("a") == {"x": b"1", "y": b"4"}
        assert [await values.add("count/z") for _ in range(3)] == [1, 2, 3]
        await values.drop("a")
        assert await values.list("a") == {}

    anyio.run(main)


def test_a_job_asks_its_coordinator(tmp_path: Path) -> None:
    asked: set[str] = set()
    values: Any = Noted(SharedValues(), asked)
    jobs: list[Any] = [Believed(index, 2, values) for index in range(2)]
    mgrs = managers(tmp_path, jobs=jobs)
    for step in (1, 2):
        assert [info.step for info in saved(mgrs, step)] == [step, step]
    # One that waits for another looks whether that one lives.
    first = mgrs[0].save(3, STATE)
    assert values.has_listed.wait(FAR)
    assert mgrs[1].save(3, STATE).result(FAR).step == first.result(FAR).step == 3
    closed(mgrs)
    assert asked >= {"put", "touch", "wait", "list", "add", "drop"}


def test_which_process_this_is() -> None:
    believed: Coordinator = Believed(1, 2, SharedValues())
    own: Coordinator = OwnDisks(believed)
    assert (own.process_index, own.process_count) == (1, 2)
