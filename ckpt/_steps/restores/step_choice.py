"""Which step a restore takes, and where a run goes on: chosen once for all processes of a job."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from msgspec import Struct

from ckpt._arguments import check_step
from ckpt._format.manifest import JsonValue
from ckpt._redaction import redact
from ckpt._steps.index import IndexedStep, PassedOver, StepIndex
from ckpt._steps.misplaced import say_misplaced
from ckpt._steps.opened import OpenedStep
from ckpt._steps.previous_steps import AilingLeaves
from ckpt._steps.processes import Processes
from ckpt.errors import (
    CorruptCheckpointError,
    StepDeletedError,
    StepNotFoundError,
    UnsupportedFormatError,
)
from ckpt.policies._context import SavedStep
from ckpt.policies._health import Healthy, why_not_healthy
from ckpt.storage._base import Storage

logger = logging.getLogger("ckpt")

# Of many steps that are passed over, the reasons of the newest ones are told.
_MOST_TOLD = 5


class RunStart(Struct, frozen=True):
    """Where a run begins or goes on.

    Attributes:
        is_fresh: Whether it begins here, since the root has no steps.
        healthy: The step that it goes on from, if that was to be healthy.
        latest: The latest step, on the process that has looked for it; None if it has to be looked
            for again.
    """

    is_fresh: bool
    healthy: int | None = None
    latest: OpenedStep | None = None


class StepChoice:
    """Chooses among the steps of one root. Its coroutines run on the engine's loop."""

    def __init__(self, storage: Storage, index: StepIndex, processes: Processes) -> None:
        """Choose among the steps of `storage`, together with the other processes of the job."""
        self._storage = storage
        self._index = index
        self._processes = processes
        self._ailing = AilingLeaves(storage)
        # What was said of steps that were passed over.
        self._said_passed: set[tuple[int, PassedOver]] = set()

    async def start_of_run(self, wanted: Healthy | None) -> RunStart:
        """Return where the run begins or goes on, after one look at the root for all processes.

        Args:
            wanted: It goes on from a step that is healthy by that; None if not.

        Raises:
            StepNotFoundError: There are steps, and none of them can be read, or is healthy.
        """
        latest: OpenedStep | None = None

        async def act() -> list[JsonValue]:
            nonlocal latest
            chosen = None
            try:
                if wanted is None:
                    latest = await self._processes.steps.open_latest()
                    is_fresh = latest is None
                    if self._index.went_back:
                        # When the run comes to them again, they have to make way.
                        self.pass_over_all(await self.left_behind())
                else:
                    chosen = await self._greatest_healthy(wanted, (), goes_back=True)
                    is_fresh = chosen is None
            except (CorruptCheckpointError, UnsupportedFormatError, StepDeletedError):
                # There is one. The restore meets that again, and raises it or takes another step.
                is_fresh = False
            if is_fresh and self._index.unreadable:
                error = self._index.no_step()
                raise StepNotFoundError(
                    f"{error.message}. To begin a new run, choose another root, or remove what is "
                    "there"
                )
            if is_fresh:
                await say_misplaced(self._storage, self._index)
            return [is_fresh, chosen]

        told: Any = await self._processes.decided("begins", "whether the run begins here", act)
        is_fresh, healthy = told
        return RunStart(is_fresh, healthy, latest)

    async def step_for_all(
        self,
        wanted: Healthy | None,
        tried: Collection[int],
        damaged: tuple[int, str] | None = None,
        *,
        goes_back: bool,
    ) -> int | None:
        """Return the latest step that was not tried, for all processes; None without any.

        Args:
            wanted: It has to be healthy by that; None if not.
            tried: Those that were passed over.
            damaged: The one that was tried last, and what is wrong with it: a save replaces it.
            goes_back: Whether the run goes on from it, so that saves replace newer ones.

        Raises:
            StepNotFoundError: It has to be healthy, and none is; says what is wrong with them.
        """

        async def act() -> int | None:
            found: Mapping[int, IndexedStep] = {}
            if wanted is None or damaged is not None:
                found = await self._processes.steps.refresh()
            if damaged is not None and damaged[0] in found:
                step, reason = damaged
                self._index.passed_over[step] = PassedOver(found[step].attempt, reason)
            if wanted is None:
                behind = await self.left_behind()
                return max((step for step in found if step not in {*tried, *behind}), default=None)
            chosen = await self._greatest_healthy(wanted, tried, goes_back=goes_back)
            if chosen is None and not tried:
                raise self._index.no_step()
            return chosen

        # All of them have to try the same one.
        chosen = await self._processes.decided("choice", "which step is restored", act)
        return None if chosen is None else check_step(chosen)

    async def left_behind(self) -> dict[int, PassedOver]:
        """Return the steps that the run went back behind.

        Disks of a job may not say the same, and there all steps count by their numbers.
        """
        if self._processes.steps is not self._index:
            return {}
        found = await self._index.left_behind()
        why = "the run went back behind it"
        return {step: PassedOver(each.attempt, why, "abandoned") for step, each in found.items()}

    async def _greatest_healthy(
        self, wanted: Healthy, tried: Collection[int], *, goes_back: bool
    ) -> int | None:
        """Return the greatest healthy step that was not tried; None if there are no others.

        Raises:
            StepNotFoundError: There are others; says what is wrong with them.
        """
        chosen, passed = await self.healthy_step(wanted, tried)
        if chosen is None and passed:
            raise self._none_healthy(passed)
        if chosen is not None and goes_back:
            # When the run comes to them again, they have to make way.
            self._index.passed_over |= passed
        return chosen

    async def healthy_step(
        self, wanted: Healthy, tried: Collection[int] = ()
    ) -> tuple[int | None, dict[int, PassedOver]]:
        """Return the greatest healthy step that was not tried, and the newer ones, with reasons.

        Without a healthy step that is None, and all. Steps that are passed over are named once.
        """
        reasons = await self.judged(wanted)
        healthy = (step for step, why in reasons.items() if why is None and step not in tried)
        chosen = max(healthy, default=None)
        passed = {
            step: why
            for step, why in reasons.items()
            if why is not None and (chosen is None or step > chosen)
        }
        if chosen is not None:
            self.say_passed(chosen, passed)
        return chosen, passed

    async def judged(self, wanted: Healthy) -> dict[int, PassedOver | None]:
        """Return for each committed step why it is not known to be healthy; None if it is."""
        attempts: dict[int, str] = {}

        async def see(found: Mapping[int, IndexedStep]) -> list[SavedStep]:
            attempts.update({step: each.attempt for step, each in found.items()})
            return await self._ailing.saved_steps(found.values())

        reasons = await self._processes.judged(see, partial(why_not_healthy, allow=wanted.allow))
        behind = await self.left_behind()
        return {
            step: behind.get(step, PassedOver(attempts[step], why, "unhealthy") if why else None)
            for step, why in reasons.items()
        }

    def say_passed(self, chosen: int, passed: Mapping[int, PassedOver]) -> None:
        """Name the steps that are passed over because they are not healthy, once."""
        if passed and not self._said_passed.issuperset(passed.items()):
            self._said_passed = set(passed.items())
            logger.warning(
                "%s: step %d is the newest healthy one; newer steps are passed over: %s",
                redact(self._storage.location),
                chosen,
                _told(passed),
            )

    async def pass_over(self, step: int, reason: str) -> None:
        """Let a save replace a step that is damaged; nothing, if it is gone."""
        found = await self._processes.steps.refresh()
        if step in found:
            self._index.passed_over[step] = PassedOver(found[step].attempt, reason)

    def pass_over_all(self, passed: Mapping[int, PassedOver]) -> None:
        """Let saves replace these steps."""
        self._index.passed_over |= passed

    def _none_healthy(self, passed: Mapping[int, PassedOver]) -> StepNotFoundError:
        count = (
            "its only step is not" if len(passed) == 1 else f"none of its {len(passed)} steps is"
        )
        return StepNotFoundError(
            f"{self._storage.location}: {count} known to be healthy: {_told(passed)}. Restore one "
            "of them by its number, leave out healthy=, or allow leaves whose values are meant "
            "with healthy=ckpt.policies.Healthy(allow=[...])"
        )


def _told(passed: Mapping[int, PassedOver]) -> str:
    """Return the reasons why steps are passed over, those of the newest first."""
    told = [f"step {step}: {passed[step].reason}" for step in sorted(passed, reverse=True)]
    more = len(told) - _MOST_TOLD
    return " | ".join(told[:_MOST_TOLD]) + (f" | and {more} more" if more > 0 else "")
