"""How fast a commit goes on while the caller blocks its own event loop, 200 ms at a time.

A train step that is called from a coroutine does that. `asleep` waits without the interpreter, as
a step that waits for its device does; `spinning` never leaves Python.
"""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import jax

from benchmarks import async_peers, workloads
from benchmarks.results import Scenario
from benchmarks.rounds import Log, Setting, in_turn, settle
from benchmarks.trees import size_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.async_peers import AsyncPeer, Saving

PyTree = Any

NAME = KIND = "blocked_loop"
_BLOCK_SECONDS = 0.2


def run(setting: Setting) -> Scenario:
    """Returns seconds from the snapshot to the commit; call it in a fresh process."""
    tree = workloads.make(workloads.large_shapes(setting.smoke))
    log = Log(NAME, setting.rounds)
    tree = asyncio.run(_run(setting, tree, log))
    return Scenario(
        name=NAME,
        kind=KIND,
        summary="f32 in equal large leaves, committed beside a loop that is blocked",
        leaves=len(jax.tree.leaves(tree)),
        size_bytes=size_bytes(tree),
        measures=log.samples(),
    )


async def _run(setting: Setting, tree: PyTree, log: Log) -> PyTree:
    ways: dict[str, Callable[[], None] | None] = {
        "unblocked": None,
        "asleep": lambda: time.sleep(_BLOCK_SECONDS),
        "spinning": _spin,
    }
    async with AsyncExitStack() as stack:
        running = {
            name: await stack.enter_async_context(
                async_peers.opened(name, setting.directory / name)
            )
            for name in setting.only(*async_peers.NAMES)
        }
        for turn in range(setting.rounds + 1):
            for name, peer in in_turn(running, turn):
                seconds = {}
                for number, (way, block) in enumerate(ways.items()):
                    tree = workloads.advance(tree)
                    seconds[way] = await _commit_seconds(peer, tree, 3 * turn + number, block)
                rates = {
                    f"{way}_rate_ratio": seconds["unblocked"] / seconds[way]
                    for way in ("asleep", "spinning")
                }
                log.add(turn, name, seconds | rates)
    return tree


async def _commit_seconds(
    peer: AsyncPeer, tree: PyTree, step: int, block: Callable[[], None] | None
) -> float:
    settle()
    saving = await peer.save(step, tree)
    clock = _Clock(saving)
    if block is not None:
        while clock.ended is None:
            block()
            await asyncio.sleep(0)
    await saving.committed()
    seconds = await asyncio.to_thread(clock.seconds)
    await peer.delete(step)
    return seconds


def _spin() -> None:
    end = time.perf_counter() + _BLOCK_SECONDS
    while time.perf_counter() < end:
        pass


class _Clock:
    """Notes in a thread of its own when a save is durable: the event loop is too late for it."""

    def __init__(self, saving: Saving) -> None:
        self._saving = saving
        self._began = time.perf_counter()
        self.ended: float | None = None
        self._thread = threading.Thread(target=self._wait)
        self._thread.start()

    def _wait(self) -> None:
        try:
            self._saving.wait_in_thread()
        finally:
            self.ended = time.perf_counter()

    def seconds(self) -> float:
        """Waits for the save and returns how long it took."""
        self._thread.join()
        assert self.ended is not None
        return self.ended - self._began
