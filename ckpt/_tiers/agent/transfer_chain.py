"""`TransferChain`: brings the steps of each tier to the next place."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from msgspec.structs import asdict

from ckpt._tiers.agent.messages import (
    FromAgent,
    StepAtTier,
    TransferLeg,
    TransferResult,
    place_of_json,
)
from ckpt._tiers.drains.drain import DrainResult
from ckpt._tiers.drains.drainer import Drainer, DrainRoute, StepNameTable, draining
from ckpt._tiers.drains.leader import transfer_of
from ckpt.errors import StorageError
from ckpt.storage._resolve import open_root


class TransferChain:
    """Drains the steps of all tiers; made by `open_chain`. Used on the agent's loop."""

    def __init__(self, count: int, tell: Callable[[FromAgent], None]) -> None:
        self._tell = tell
        self._drainers: list[Drainer] = []
        self._names = [StepNameTable() for _ in range(count)]
        # By tier, the newest step that the next place gets only at the end.
        self._unwanted: list[StepAtTier | None] = [None] * count
        # By tier, the steps that the trainer has told of, and those that were asked for, with their
        # newest saves.
        self._known: list[dict[int, str]] = [{} for _ in range(count)]
        self._requested: list[dict[int, str]] = [{} for _ in range(count)]
        # By tier, the steps that the next place has got, with their saves.
        self._moved: list[dict[int, str]] = [{} for _ in range(count)]

    async def add(self, step: StepAtTier) -> None:
        """Take a step that was committed at a tier; a wanted one is held when this returns."""
        self._names[step.leg].add(step.step, step.step_dir)
        self._known[step.leg][step.step] = step.save
        if step.is_wanted:
            await self._request(step)
            return
        kept = self._unwanted[step.leg]
        if kept is None or step.step >= kept.step:
            self._unwanted[step.leg] = step

    async def _request(self, step: StepAtTier) -> None:
        self._requested[step.leg][step.step] = step.save
        try:
            await self._drainers[step.leg].request(step.step, step.save)
        except StorageError as error:
            refused = DrainResult(step.step, "refused", reason=error.message, save=step.save)
            self._note_result(step.leg, refused)

    async def finish(self, seconds: float) -> list[int]:
        """Drain the rest, and the newest step of each tier; return the steps that are left."""
        ends, left = time.monotonic() + seconds, set[int]()
        for leg, drainer in enumerate(self._drainers):
            newest, requested = self._unwanted[leg], self._requested[leg]
            if (
                newest is not None
                and newest.step >= max(requested, default=-1)
                and requested.get(newest.step) != newest.save
            ):
                await self._request(newest)
            left.update(await drainer.finish(max(ends - time.monotonic(), 0.0)))
            if leg + 1 < len(self._drainers):
                # The trainer may have decided about these steps already, but can no longer do so.
                for step, save in self._moved[leg].items():
                    if self._known[leg + 1].get(step) != save:
                        step_dir = self._names[leg].name(step)
                        await self.add(StepAtTier(leg + 1, step, step_dir, True, save))
        return sorted(left)

    def _note_result(self, leg: int, drained: DrainResult) -> None:
        if drained.is_safe:
            self._moved[leg][drained.step] = drained.save
        self._tell(TransferResult(**asdict(drained), leg=leg))


@contextlib.asynccontextmanager
async def open_chain(
    legs: Sequence[TransferLeg], tell: Callable[[FromAgent], None]
) -> AsyncIterator[TransferChain]:
    """Drain steps while the body runs; `tell` is called with the outcomes."""
    async with contextlib.AsyncExitStack() as stack:
        found = TransferChain(len(legs), tell)
        for number, leg in enumerate(legs):
            places = open_root(place_of_json(leg.source)), open_root(place_of_json(leg.target))
            drainer = await stack.enter_async_context(
                draining(
                    DrainRoute(*places, found._names[number]),
                    partial(found._note_result, number),
                    bytes_per_second=leg.bytes_per_second,
                    most_waiting=leg.most_waiting,
                    strategy=transfer_of(*leg.process),
                )
            )
            found._drainers.append(drainer)
        yield found
