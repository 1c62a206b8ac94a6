"""Campaigns of many managers, or many callers of one, in one process."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import ckpt
import ckpt.sync
from ckpt.errors import StepExistsError
from ckpt.testing.compare import differences
from tests.reliability.tally import Tally

__all__ = ["managers_in_tasks", "managers_in_threads", "one_manager_in_threads"]

CALLERS = 8
PATIENCE_S = 120


def state(who: int, number: int) -> dict[str, Any]:
    return {"w": np.full(1000, 1000 * who + number), "who": who, "number": number}


def losses_of(who: int, number: int, found: Any) -> list[str]:
    return [f"{who}, {number}: {line}" for line in differences(state(who, number), found)]


def managers_in_threads(directory: Path, count: int, seed: int = 0) -> Tally:
    """Let eight threads save and restore `count` times, each with a manager of its own."""
    together = threading.Barrier(CALLERS)

    def work(who: int) -> Tally:
        tally = Tally()
        together.wait(PATIENCE_S)
        for number in range(count):
            # A manager for every two saves: they are made and closed beside each other, too.
            with ckpt.sync.CheckpointManager(directory / str(who)) as mgr:
                for step in (2 * number, 2 * number + 1):
                    mgr.save(step, state(who, step)).result(PATIENCE_S)
                    tally += Tally(1, losses=losses_of(who, step, mgr.restore(step)))
                if mgr.all_steps() != list(range(2 * number + 2)):
                    tally.losses.append(f"{who}: {mgr.all_steps()} after round {number}")
        return tally

    return _in_threads(work)


def managers_in_tasks(directory: Path, count: int, seed: int = 0) -> Tally:
    """The same in eight tasks of one loop."""

    async def work(who: int) -> Tally:
        tally = Tally()
        for number in range(count):
            async with ckpt.CheckpointManager(directory / str(who)) as mgr:
                for step in (2 * number, 2 * number + 1):
                    await (await mgr.save(step, state(who, step)))
                    tally += Tally(1, losses=losses_of(who, step, await mgr.restore(step)))
                if await mgr.all_steps() != list(range(2 * number + 2)):
                    tally.losses.append(f"{who}: {await mgr.all_steps()} after round {number}")
        return tally

    async def main() -> Tally:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work(who)) for who in range(CALLERS)]
        return sum((task.result() for task in tasks), Tally())

    return asyncio.run(asyncio.wait_for(main(), PATIENCE_S * (1 + count / 10)))


def one_manager_in_threads(directory: Path, count: int, seed: int = 0) -> Tally:
    """Let eight threads use one manager, for steps of their own and for one they all want.

    A fault is a thread that found the common step taken; of each round all but one have to.
    """
    together = threading.Barrier(CALLERS)
    winners: list[int] = []
    with ckpt.sync.CheckpointManager(directory) as mgr:

        def work(who: int) -> Tally:
            tally = Tally()
            for number in range(count):
                together.wait(PATIENCE_S)
                first = number * (CALLERS + 1)
                own = first + 1 + who
                mgr.save(own, state(who, own)).result(PATIENCE_S)
                tally += Tally(1, losses=losses_of(who, own, mgr.restore(own)))
                try:
                    mgr.save(first, state(who, first)).result(PATIENCE_S)
                    winners.append(first)
                except StepExistsError:
                    tally.faults += 1
            return tally

        tally = _in_threads(work)
        steps = mgr.all_steps()
    if steps != list(range(count * (CALLERS + 1))):
        tally.losses.append(f"after all: {steps}")
    if sorted(winners) != [number * (CALLERS + 1) for number in range(count)]:
        tally.losses.append(f"the common steps were saved so often: {sorted(winners)}")
    return tally


def _in_threads(work: Any) -> Tally:
    with ThreadPoolExecutor(CALLERS) as threads:
        return sum(threads.map(work, range(CALLERS)), Tally())
