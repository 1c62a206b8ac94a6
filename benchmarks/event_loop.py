"""The caller's event loop: its lag, and how fast a commit is beside a loop that is blocked.

`heartbeat` has a beat every millisecond, while a state is saved and restored. A beat that comes
3 ms late means that whatever else the loop serves waited 3 ms. Two further rows tell what of it is
the machine: the same loop while nothing happens, and while another process writes and reads the
same number of bytes.

`blocked_loop` blocks the loop for 200 ms at a time, as a train step that is called from a coroutine
does. `asleep` waits without the interpreter, as a step that waits for its device does; `spinning`
never leaves Python.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, TypeVar

from benchmarks import workloads
from benchmarks.peers import AsyncPeer, AsyncSave, opened_async
from benchmarks.rounds import Log, Setting, in_turn, settle, warm
from benchmarks.workloads import PyTree, abstract, check_equal, size_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.results import Scenario

ValueT = TypeVar("ValueT")

HEARTBEAT, BLOCKED_LOOP = "heartbeat", "blocked_loop"
IDLE, NEIGHBOUR = "nothing", "other process"
PHASES = ("snapshot", "commit", "restore")
_BEAT_SECONDS = 0.001
# Beats of so many saves and restores make one round: a p99 needs hundreds of them.
_REPEATS = 3
_BLOCK_SECONDS = 0.2
_BLOCK_BYTES = 1 << 23
Lags = dict[str, list[float]]


def run(setting: Setting, name: str) -> Scenario:
    """Returns the samples of one of the two; call it in a fresh process."""
    log = Log(name, setting.rounds)
    measure, how = _SCENARIOS[name]
    tree = asyncio.run(measure(setting, log))
    return log.result(name, f"f32 in equal large leaves, {how}", tree)


async def _opened(stack: AsyncExitStack, setting: Setting) -> dict[str, AsyncPeer]:
    return {
        name: await stack.enter_async_context(opened_async(name, setting.directory / name))
        for name in setting.both
    }


async def _heartbeat(setting: Setting, log: Log) -> PyTree:
    tree = workloads.make(workloads.large_shapes(setting.smoke))
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        running = await _opened(stack, setting)
        neighbour = stack.enter_context(
            ProcessPoolExecutor(1, get_context("spawn"), _take_memory, (size_bytes(tree),))
        )
        file = setting.directory / "neighbour"

        async def beside(neighbours_work: Callable[[Path], None]) -> None:
            await loop.run_in_executor(neighbour, neighbours_work, file)

        async def idle() -> None:
            await asyncio.sleep(0.1 if setting.smoke else 0.5)

        # The process has started, and has its memory.
        await loop.run_in_executor(neighbour, settle)
        for turn in range(setting.rounds + 1):
            for name, peer in in_turn(running, turn):
                lags: Lags = {phase: [] for phase in PHASES}
                for repeat in range(1 if setting.smoke else _REPEATS):
                    step = turn * _REPEATS + repeat
                    tree = await _one_save(peer, tree, step, lags, check=turn == repeat == 0)
                log.add(turn, name, _figures(lags))
            for row, repeats, write, read in (
                (NEIGHBOUR, _REPEATS, partial(beside, _write), partial(beside, _read)),
                (IDLE, 1, idle, idle),
            ):
                lags = {"commit": [], "restore": []}
                for _ in range(repeats):
                    settle()
                    await _beating(write, lags["commit"])
                    await _beating(read, lags["restore"])
                log.add(turn, row, _figures(lags))
    return tree


async def _one_save(peer: AsyncPeer, tree: PyTree, step: int, lags: Lags, *, check: bool) -> PyTree:
    tree = workloads.advance(tree)
    settle()
    saving = await _beating(lambda: peer.save(step, tree), lags["snapshot"])
    await _beating(saving.committed, lags["commit"])
    warm(peer.place / str(step))
    target = abstract(tree)
    settle()
    restored = await _beating(lambda: peer.restore(step, target), lags["restore"])
    if check:
        check_equal(restored, tree)
    del restored
    await peer.delete(step)
    return tree


async def _beating(action: Callable[[], Awaitable[ValueT]], lags: list[float]) -> ValueT:
    """Returns what awaiting the action gives; adds the lag of every beat meanwhile."""
    beats = asyncio.create_task(_beat(lags))
    await asyncio.sleep(0)
    try:
        return await action()
    finally:
        await asyncio.sleep(2 * _BEAT_SECONDS)  # the beat that a blocked loop has kept waiting
        beats.cancel()


async def _beat(lags: list[float]) -> None:
    before = time.perf_counter()
    while True:
        await asyncio.sleep(_BEAT_SECONDS)
        now = time.perf_counter()
        lags.append(now - before - _BEAT_SECONDS)
        before = now


def _figures(lags: Lags) -> dict[str, float]:
    figures = {}
    for phase, values in lags.items():
        figures[f"{phase}_p50"] = sorted(values)[len(values) // 2]
        figures[f"{phase}_p99"] = p99(values)
        figures[f"{phase}_max"] = max(values)
    return figures


def p99(values: Sequence[float]) -> float:
    """Returns the 99th percentile; of fewer than a hundred values, the highest."""
    return sorted(values)[min(len(values) - 1, len(values) * 99 // 100)]


# What the other process writes and reads; made there.
_memory = memoryview(b"")


def _take_memory(nbytes: int) -> None:
    global _memory
    _memory = memoryview(bytearray(os.urandom(_BLOCK_BYTES)) * -(-nbytes // _BLOCK_BYTES))[:nbytes]


def _write(file: Path) -> None:
    """Writes the memory to a file, until it is durable; in the other process."""
    with open(file, "wb", buffering=0) as opened:
        for start in range(0, len(_memory), _BLOCK_BYTES):
            opened.write(_memory[start : start + _BLOCK_BYTES])
        os.fsync(opened.fileno())


def _read(file: Path) -> None:
    with open(file, "rb", buffering=0) as opened:
        for start in range(0, len(_memory), _BLOCK_BYTES):
            opened.readinto(_memory[start : start + _BLOCK_BYTES])


async def _blocked_loop(setting: Setting, log: Log) -> PyTree:
    tree = workloads.make(workloads.large_shapes(setting.smoke))
    ways: dict[str, Callable[[], None] | None] = {
        "unblocked": None,
        "asleep": lambda: time.sleep(_BLOCK_SECONDS),
        "spinning": _spin,
    }
    async with AsyncExitStack() as stack:
        running = await _opened(stack, setting)
        for turn, name, peer in log.turns(running):
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
    began = time.perf_counter()
    with ThreadPoolExecutor(max_workers=1) as executor:
        # In a thread: the event loop is too late for it.
        ended = executor.submit(_time_of_end, saving)
        while block is not None and not ended.done():
            block()
            await asyncio.sleep(0)
        await saving.committed()
        seconds = await asyncio.wrap_future(ended) - began
    await peer.delete(step)
    return seconds


def _time_of_end(saving: AsyncSave) -> float:
    saving.wait_in_thread()
    return time.perf_counter()


def _spin() -> None:
    end = time.perf_counter() + _BLOCK_SECONDS
    while time.perf_counter() < end:
        pass


_SCENARIOS = {
    HEARTBEAT: (_heartbeat, "saved and restored from an event loop"),
    BLOCKED_LOOP: (_blocked_loop, "committed beside a loop that is blocked"),
}
