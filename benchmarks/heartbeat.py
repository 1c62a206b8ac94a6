"""Lag of the caller's event loop, by a beat every millisecond, while a state is saved and restored.

A beat that comes 3 ms late means that whatever else the loop serves waited 3 ms. Two further rows
tell what of it is the machine: the same loop while nothing goes on, and while another process
writes and reads the same number of bytes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, TypeVar

import jax

from benchmarks import async_peers, pagecache, workloads
from benchmarks.neighbour import Neighbour
from benchmarks.results import Scenario
from benchmarks.rounds import Log, Setting, in_turn, settle
from benchmarks.trees import abstract, check_equal, size_bytes

if TYPE_CHECKING:
    from benchmarks.async_peers import AsyncPeer

PyTree = Any
ValueT = TypeVar("ValueT")

NAME = KIND = "heartbeat"
IDLE, NEIGHBOUR = "nothing", "other process"
PHASES = ("snapshot", "commit", "restore")
_BEAT_SECONDS = 0.001
# Beats of so many saves and restores make one round: a p99 needs hundreds of them.
_REPEATS = 3


def run(setting: Setting) -> Scenario:
    """Returns the lag while saving and restoring; call it in a fresh process."""
    tree = workloads.make(workloads.large_shapes(setting.smoke))
    log = Log(NAME, setting.rounds)
    tree = asyncio.run(_run(setting, tree, log))
    return Scenario(
        name=NAME,
        kind=KIND,
        summary="f32 in equal large leaves, saved and restored from an event loop",
        leaves=len(jax.tree.leaves(tree)),
        size_bytes=size_bytes(tree),
        measures=log.samples(),
    )


async def _run(setting: Setting, tree: PyTree, log: Log) -> PyTree:
    async with AsyncExitStack() as stack:
        running = {
            name: await stack.enter_async_context(
                async_peers.opened(name, setting.directory / name)
            )
            for name in setting.only(*async_peers.NAMES)
        }
        neighbour = Neighbour(setting.directory / "neighbour", size_bytes(tree))
        await stack.enter_async_context(neighbour)
        for turn in range(setting.rounds + 1):
            for name, peer in in_turn(running, turn):
                lags: dict[str, list[float]] = {phase: [] for phase in PHASES}
                for repeat in range(1 if setting.smoke else _REPEATS):
                    step = turn * _REPEATS + repeat
                    tree = await _one_save(peer, tree, step, lags, check=turn == repeat == 0)
                log.add(turn, name, _figures(lags))
            log.add(turn, NEIGHBOUR, _figures(await _beside(neighbour)))
            log.add(turn, IDLE, _figures(await _idle(0.1 if setting.smoke else 0.5)))
    return tree


async def _one_save(
    peer: AsyncPeer, tree: PyTree, step: int, lags: dict[str, list[float]], *, check: bool
) -> PyTree:
    tree = workloads.advance(tree)
    settle()
    saving = await _beating(lambda: peer.save(step, tree), lags["snapshot"])
    await _beating(saving.committed, lags["commit"])
    pagecache.warm(peer.place(step))
    target = abstract(tree)
    settle()
    restored = await _beating(lambda: peer.restore(step, target), lags["restore"])
    if check:
        check_equal(restored, tree)
    del restored
    await peer.delete(step)
    return tree


async def _beside(neighbour: Neighbour) -> dict[str, list[float]]:
    lags: dict[str, list[float]] = {"commit": [], "restore": []}
    for _ in range(_REPEATS):
        settle()
        await _beating(neighbour.write, lags["commit"])
        await _beating(neighbour.read, lags["restore"])
    return lags


async def _idle(seconds: float) -> dict[str, list[float]]:
    lags: dict[str, list[float]] = {"commit": [], "restore": []}
    settle()
    for each in lags.values():
        await _beating(lambda: asyncio.sleep(seconds), each)
    return lags


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


def _figures(lags: dict[str, list[float]]) -> dict[str, float]:
    figures = {}
    for phase, values in lags.items():
        ordered = sorted(values)
        figures[f"{phase}_p50"] = ordered[len(ordered) // 2]
        figures[f"{phase}_p99"] = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
        figures[f"{phase}_max"] = ordered[-1]
    return figures
