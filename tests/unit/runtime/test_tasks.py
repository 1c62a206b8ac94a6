"""The same done with many things at once."""

from __future__ import annotations

import anyio
import pytest

from ckpt._runtime.futures import for_each
from ckpt.errors import StorageError


def test_everything_is_done_by_a_bounded_number_of_tasks() -> None:
    async def main() -> None:
        begun: list[int] = []
        goes_on = anyio.Event()

        async def act(number: int) -> None:
            begun.append(number)
            await goes_on.wait()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(for_each, act, range(5000))
            await anyio.wait_all_tasks_blocked()
            # Of 1024 requests, which may be under way at once, none waits for a task.
            assert len(begun) == 1024
            goes_on.set()
        assert sorted(begun) == list(range(5000))

    anyio.run(main)


def test_one_failure_ends_all_of_it() -> None:
    async def main() -> None:
        begun: list[int] = []

        async def act(number: int) -> None:
            begun.append(number)
            if number == 2000:
                raise StorageError("no more")
            await anyio.lowlevel.checkpoint()

        with pytest.raises(StorageError, match="no more"):
            await for_each(act, range(50_000))
        assert len(begun) < 50_000
        await for_each(act, ())

    anyio.run(main)
