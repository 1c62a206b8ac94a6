"""A process that is cancelled at any moment: the others hear of it at once, and all go on later."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from ckpt._job.agreement.peers import Peers
from ckpt.coordination._jobs import MemoryKeyValues
from ckpt.errors import CheckpointError, CoordinationTimeoutError

COUNT, LIMIT = 3, 60.0


class Requests:
    """What processes share, as one of them sees it; something happens at one of its requests."""

    def __init__(self, values: MemoryKeyValues, happens: Callable[[int], None]) -> None:
        self._values = values
        self._happens = happens
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        return partial(self._ask, getattr(self._values, name))

    async def _ask(self, request: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        # Before it is made, and when it has been.
        for is_made in (False, True):
            self._happens(self.count)
            self.count += 1
            if not is_made:
                await anyio.lowlevel.checkpoint()
                found = await request(*args)
        await anyio.lowlevel.checkpoint()
        return found


class Job:
    def __init__(self, index: int, values: Any) -> None:
        self.process_index, self.process_count = index, COUNT
        self._values = values

    def key_values(self) -> Any:
        return self._values


async def agree(peers: Peers) -> Any:
    async def act(_: Any) -> str:
        await anyio.lowlevel.checkpoint()
        return "agreed"

    return await peers.all_or_none("kind", "the agreement", act)


async def decide(peers: Peers) -> Any:
    async def act() -> str:
        await anyio.lowlevel.checkpoint()
        return "decided"

    return await peers.on_primary("kind", "the decision", act)


async def run(
    call: Callable[[Peers], Awaitable[Any]], process: int, moment: int | None
) -> tuple[list[Any], list[Any], int]:
    """Return what all met in the first call and in a second one, and how many moments there were.

    The first one opens the managers; in it `process` is cancelled at a moment.
    """
    values = MemoryKeyValues()
    scopes = [anyio.CancelScope() for _ in range(COUNT)]
    first: list[Any] = ["cancelled"] * COUNT
    second: list[Any] = [None] * COUNT
    counts = [0] * COUNT

    def happens(index: int, now: int) -> None:
        if index == process and now == moment:
            scopes[index].cancel()

    async def one(index: int) -> None:
        view = Requests(values, partial(happens, index))
        peers = Peers(Job(index, view), LIMIT, "root", 1 << 20)
        with scopes[index]:
            first[index] = await met(call, peers)
        counts[index] = view.count
        second[index] = await met(call, peers)

    async with anyio.create_task_group() as tasks:
        for index in range(COUNT):
            tasks.start_soon(one, index)
    return first, second, counts[process]


async def met(call: Callable[[Peers], Awaitable[Any]], peers: Peers) -> Any:
    try:
        return await call(peers)
    except CheckpointError as error:
        return error


@pytest.mark.parametrize("process", [0, 2])
@pytest.mark.parametrize("call", [agree, decide])
def test_nobody_waits_for_one_that_is_cancelled(call: Any, process: int) -> None:
    said = {agree: "agreed", decide: "decided"}[call]
    first, second, moments = anyio.run(run, call, process, None)
    assert first == second == [said] * COUNT
    for moment in range(moments):
        first, second, _ = anyio.run(run, call, process, moment)
        about = f"cancelled at moment {moment} of {moments}: {first}"
        assert not any(isinstance(each, CoordinationTimeoutError) for each in first), about
        assert second == [said] * COUNT, f"{about}, then {second}"


def test_a_call_that_one_made_alone_before_anything_was_agreed_harms_no_later_one() -> None:
    async def main() -> None:
        values = MemoryKeyValues()
        every = [Peers(Job(index, values), 0.5, "root", 1 << 20) for index in range(COUNT)]
        with pytest.raises(CoordinationTimeoutError, match=f"process 2 of {COUNT}"):
            await agree(every[0])
        found: list[Any] = [None] * COUNT

        async def one(index: int) -> None:
            found[index] = await met(agree, every[index])

        async with anyio.create_task_group() as tasks:
            for index in range(COUNT):
                tasks.start_soon(one, index)
        assert found == ["agreed"] * COUNT

    anyio.run(main)
