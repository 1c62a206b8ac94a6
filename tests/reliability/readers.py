"""Campaigns of readers beside a trainer that deletes and replaces what they read."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio

import ckpt.sync
from ckpt._format.manifest import ItemEntry
from ckpt._plan.adapt import Adapt
from ckpt.errors import StepNotFoundError
from ckpt.handlers._base import ItemReader
from ckpt.handlers._pytree import PyTreeHandler
from ckpt.testing.compare import differences
from tests.reliability.races import PATIENCE_S, command, started
from tests.reliability.tally import Tally
from tests.support.numbered_states import state_of

__all__ = ["latest_beside_a_trainer", "steps_beside_a_trainer"]

VERSIONS = 8
LONGEST_PAUSE_S = 0.04


class SlowHandler(PyTreeHandler):
    """Restores trees like the handler of the library, after a pause: manifest read, data not."""

    def __init__(self, choice: random.Random) -> None:
        super().__init__()
        self._choice = choice

    async def load(self, entry: ItemEntry, like: Any, adapt: Adapt, reader: ItemReader) -> Any:
        if self._choice.random() < 0.5:
            await anyio.sleep(self._choice.uniform(0, LONGEST_PAUSE_S))
        return await super().load(entry, like, adapt, reader)


def steps_beside_a_trainer(directory: Path, count: int, seed: int = 0) -> Tally:
    """Restore the latest step by its number, `count` times, while a trainer keeps one step only.

    Faults are the restores that say that the step is gone; any other error is a loss.
    """

    def read(mgr: ckpt.sync.CheckpointManager) -> Any:
        step = mgr.latest_step()
        assert step is not None, "there was no step, between two steps"
        return mgr.restore(step)

    return _beside_a_trainer(directory, count, seed, read, may_be_gone=True)


def latest_beside_a_trainer(directory: Path, count: int, seed: int = 0) -> Tally:
    """Restore the latest step, whichever it is, `count` times; that never fails.

    Faults are the steps that were there at the beginning of a restore, and not at its end.
    """
    return _beside_a_trainer(directory, count, seed, lambda mgr: mgr.restore(), may_be_gone=False)


def _beside_a_trainer(
    directory: Path,
    count: int,
    seed: int,
    read: Callable[[ckpt.sync.CheckpointManager], Any],
    *,
    may_be_gone: bool,
) -> Tally:
    states = [state_of(number, large=1 << 16) for number in range(VERSIONS)]
    slow = SlowHandler(random.Random(seed))
    tally = Tally()
    with (
        started(command("train_fast.py", directory)) as (trainer,),
        ckpt.sync.CheckpointManager(directory, mode="r", handlers=[slow]) as mgr,
    ):
        for number in range(count):
            before = mgr.latest_step()
            tally.runs += 1
            try:
                found = read(mgr)
            except StepNotFoundError as error:
                # StepDeletedError, unless it was gone before a byte of it was read.
                tally.faults += 1
                if not may_be_gone:
                    tally.lose(f"restore {number}", error)
                continue
            except Exception as error:
                tally.lose(f"restore {number}", error)
                continue
            tally.faults += not may_be_gone and mgr.latest_step() != before
            other = differences(states[found["number"]], found)
            if other:
                tally.losses.append(f"restore {number} is a mixture: {other[:3]}")
        assert trainer.stdin is not None
        trainer.stdin.close()
        trainer.wait(PATIENCE_S)
        if trainer.returncode:
            tally.losses.append(f"the trainer ended with {trainer.returncode}")
    return tally
