"""The step that a restore takes, or a run goes on from: chosen once for all processes of a job."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import anyio.from_thread
from msgspec import Struct
from msgspec.structs import asdict

from ckpt._arguments import check_step
from ckpt._format.manifest import JsonValue
from ckpt._format.manifest_head import left_behind
from ckpt._redaction import redact
from ckpt._runtime.threads import run_in_thread
from ckpt._steps.index import IndexedStep, PassedOver, StepIndex
from ckpt._steps.opened import OpenedStep
from ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StepDeletedError,
    StepNotFoundError,
    StorageError,
    UnsupportedFormatError,
)
from ckpt.keep._questions import LeafNotes, Requirement, SavedStep
from ckpt.storage._base import Storage
from ckpt.storage._manifests import read_manifest

if TYPE_CHECKING:
    from ckpt._job.solo import Processes

logger = logging.getLogger("ckpt")
# Manifests that are read at the same time.
_READS = 8


def saved_step(
    indexed: IndexedStep,
    behind: Collection[int] = (),
    notes: LeafNotes | None = None,
    metadata: Any = None,
) -> SavedStep:
    """Return a committed step in the form that policies take.

    Args:
        indexed: The step.
        behind: Start times of the saves that the run went back behind.
        notes: The notes on its leaves, by name; None for those in the head of its manifest.
        metadata: Its `custom_metadata`, as far as policies get it.
    """
    return SavedStep(
        indexed.step,
        indexed.created_ns / 1e9,
        indexed.metrics,
        groups=indexed.groups,
        left_behind=indexed.created_ns in behind,
        custom_metadata=metadata,
        nbytes=indexed.stored_bytes,
        **asdict(indexed.notes if notes is None else notes),
    )


class NamedNotes:
    """The notes on leaves of steps, with the names. Its coroutines run on the engine's loop.

    The head of a manifest has only the number of these leaves. So the whole manifest of a step with
    notes is read, once for each attempt; with `with_metadata`, the manifests of all steps are read.
    """

    def __init__(self, storage: Storage, *, with_metadata: bool = False) -> None:
        self._storage = storage
        self._with_metadata = with_metadata
        self._known: dict[tuple[str, LeafNotes], tuple[LeafNotes, JsonValue]] = {}
        # Steps whose manifests the storage could not read in the last call.
        self.unread: frozenset[int] = frozenset()

    async def saved_steps(self, found: Iterable[IndexedStep]) -> list[SavedStep]:
        """Return committed steps in the form that keep policies take, with leaf names.

        A step that cannot be read, or was replaced meanwhile, has no names.
        """
        steps = list(found)
        wanted = {
            (each.attempt, each.notes): each
            for each in steps
            if each.notes or (self._with_metadata and not each.is_foreign)
        }
        # Collected in a new dict, since another call may look at other steps meanwhile.
        found_now = {key: known for key, known in self._known.items() if key in wanted}
        unread: set[int] = set()
        limiter = anyio.CapacityLimiter(_READS)
        # A run that has diverged has the same odd leaves in every step: keep them once.
        same = {known: known for known, _ in found_now.values()}

        async def read(each: IndexedStep) -> None:
            async with limiter:
                try:
                    manifest = await read_manifest(self._storage, each.step_dir)
                    known = each.notes
                    if known:
                        # Imported here: this needs numpy, and lists of steps do without it.
                        from ckpt.extensions import notes_of_step

                        known = await run_in_thread(notes_of_step, manifest)
                except StorageError:
                    unread.add(each.step)
                    return
                except CheckpointError:
                    return
                if manifest.attempt == each.attempt:
                    metadata = manifest.metadata if self._with_metadata else None
                    found_now[each.attempt, each.notes] = same.setdefault(known, known), metadata

        async with anyio.create_task_group() as tasks:
            for key, each in wanted.items():
                if key not in found_now:
                    tasks.start_soon(read, each)
        self._known, self.unread = found_now, frozenset(unread)
        behind, unnamed = left_behind(steps), (None, None)
        return [
            saved_step(each, behind, *found_now.get((each.attempt, each.notes), unnamed))
            for each in steps
        ]


class PreviousSteps(Sequence[SavedStep]):
    """The committed steps of a root for a policy, read on demand. Used in threads."""

    def __init__(self, index: StepIndex) -> None:
        self._index = index
        self._steps: list[SavedStep] | None = None

    @overload
    def __getitem__(self, at: int) -> SavedStep: ...
    @overload
    def __getitem__(self, at: slice) -> list[SavedStep]: ...
    def __getitem__(self, at: int | slice) -> SavedStep | list[SavedStep]:
        if at == -1 and self._steps is None:
            # Most policies want only the newest step.
            latest = anyio.from_thread.run(self._index.latest)
            if latest is not None:
                return saved_step(latest)
        return self._every()[at]

    def __len__(self) -> int:
        return len(self._every())

    def __bool__(self) -> bool:
        return bool(self._steps) or anyio.from_thread.run(self._index.latest) is not None

    def _every(self) -> list[SavedStep]:
        if self._steps is None:
            found = anyio.from_thread.run(self._index.refresh)
            self._steps = [saved_step(each) for each in found.values()]
        return self._steps


# The largest number of passed-over steps whose reasons are given: those of the newest ones.
_MOST_TOLD = 5


class RunStart(Struct, frozen=True):
    """The step from which a run goes on, or that it begins from scratch.

    Attributes:
        is_fresh: True if the run begins from scratch, since the root has no steps.
        chosen: The step that the run goes on from, if something is required of it.
        latest: The latest step, on the process that has looked for it; None if it must be looked
            for again.
    """

    is_fresh: bool
    chosen: int | None = None
    latest: OpenedStep | None = None


class StepChoice:
    """Chooses among the steps of one root. Its coroutines run on the engine's loop."""

    def __init__(self, storage: Storage, index: StepIndex, processes: Processes) -> None:
        self._storage = storage
        self._index = index
        self._processes = processes
        self._notes = NamedNotes(storage)
        # The passed-over steps that a warning has named.
        self._said_passed: set[tuple[int, PassedOver]] = set()

    async def start_of_run(self, wanted: Requirement | None) -> RunStart:
        """Return how the run begins or goes on; one process looks at the root for all.

        Args:
            wanted: What is required of the step; None for any step.

        Raises:
            StepNotFoundError: There are steps, but none of them can be read, or meets it.
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
                        # The run will come to these step numbers again and replace the old steps.
                        self.pass_over_all(await self.left_behind())
                else:
                    chosen = await self._greatest(wanted, (), goes_back=True)
                    is_fresh = chosen is None
            except (CorruptCheckpointError, UnsupportedFormatError, StepDeletedError):
                # The root has a step. The restore meets this error again, and raises it or takes
                # another step.
                is_fresh = False
            if is_fresh and self._index.unreadable:
                error = self._index.no_step()
                raise StepNotFoundError(
                    f"{error.message}. To begin a new run, choose another root, or remove what is "
                    "there"
                )
            if is_fresh:
                from ckpt._steps.misplaced import say_misplaced

                await say_misplaced(self._storage, self._index)
            return [is_fresh, chosen]

        told: Any = await self._processes.decided("begins", "whether the run begins here", act)
        is_fresh, chosen = told
        return RunStart(is_fresh, chosen, latest)

    async def step_for_all(
        self,
        wanted: Requirement | None,
        tried: Collection[int],
        damaged: tuple[int, str] | None = None,
        *,
        goes_back: bool,
    ) -> int | None:
        """Return the latest step that was not tried, for all processes; None if there is none.

        Args:
            wanted: What is required of the step; None for any step.
            tried: The steps that were passed over.
            damaged: The step that was tried last, and its fault: a save replaces it.
            goes_back: True if the run goes on from the step, so that saves replace newer ones.

        Raises:
            StepNotFoundError: No step is as required; the error gives the reasons.
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
            chosen = await self._greatest(wanted, tried, goes_back=goes_back)
            if chosen is None and not tried:
                raise self._index.no_step()
            return chosen

        # All processes must try the same step.
        chosen = await self._processes.decided("choice", "which step is restored", act)
        return None if chosen is None else check_step(chosen)

    async def left_behind(self) -> dict[int, PassedOver]:
        """Return the steps that the run went back behind."""
        found = await self._processes.steps.left_behind()
        why = "the run went back behind it"
        return {step: PassedOver(each.attempt, why, "abandoned") for step, each in found.items()}

    async def _greatest(
        self, wanted: Requirement, tried: Collection[int], *, goes_back: bool
    ) -> int | None:
        """Return the greatest step as required, not tried; None if there are no other steps.

        Raises:
            StepNotFoundError: There are others, and none is as required; it gives the reasons.
        """
        chosen, passed = await self.greatest(wanted, tried)
        if chosen is None and passed:
            raise self._none(wanted, passed)
        if chosen is not None and goes_back:
            # The run will come to these step numbers again and replace the old steps.
            self._index.passed_over |= passed
        return chosen

    async def greatest(
        self, wanted: Requirement, tried: Collection[int] = ()
    ) -> tuple[int | None, dict[int, PassedOver]]:
        """Return the greatest step as required, not tried, and the newer ones, with reasons.

        If there is none, return None and all steps. A warning names passed-over steps once.
        """
        reasons = await self.judged(wanted)
        fit = (step for step, why in reasons.items() if why is None and step not in tried)
        chosen = max(fit, default=None)
        passed = {
            step: why
            for step, why in reasons.items()
            if why is not None and (chosen is None or step > chosen)
        }
        if chosen is not None:
            self.say_passed(wanted, chosen, passed)
        return chosen, passed

    async def judged(self, wanted: Requirement) -> dict[int, PassedOver | None]:
        """Return for each committed step why it is not as required; None for one that is."""
        attempts: dict[int, str] = {}

        async def see(found: Mapping[int, IndexedStep]) -> list[SavedStep]:
            attempts.update({step: each.attempt for step, each in found.items()})
            return await self._notes.saved_steps(found.values())

        reasons = await self._processes.judged(see, wanted.why_not)
        behind, opposite = await self.left_behind(), wanted.opposite
        return {
            step: behind.get(step, PassedOver(attempts[step], why, opposite) if why else None)
            for step, why in reasons.items()
        }

    def say_passed(
        self, wanted: Requirement, chosen: int, passed: Mapping[int, PassedOver]
    ) -> None:
        """Warn once about steps that are passed over because they are not as required."""
        if passed and not self._said_passed.issuperset(passed.items()):
            self._said_passed = set(passed.items())
            logger.warning(
                "%s: step %d is the newest %s one; newer steps are passed over: %s",
                redact(self._storage.location),
                chosen,
                wanted.name,
                _join_reasons(passed),
            )

    async def pass_over(self, step: int, reason: str) -> None:
        """Let a save replace a damaged step; does nothing if the step is gone."""
        found = await self._processes.steps.refresh()
        if step in found:
            self._index.passed_over[step] = PassedOver(found[step].attempt, reason)

    def pass_over_all(self, passed: Mapping[int, PassedOver]) -> None:
        self._index.passed_over |= passed

    def _none(self, wanted: Requirement, passed: Mapping[int, PassedOver]) -> StepNotFoundError:
        count = (
            "its only step is not" if len(passed) == 1 else f"none of its {len(passed)} steps is"
        )
        return StepNotFoundError(
            f"{self._storage.location}: {count} known to be {wanted.name}: "
            f"{_join_reasons(passed)}. Restore one of them by its number, {wanted.advice}"
        )


def _join_reasons(passed: Mapping[int, PassedOver]) -> str:
    """Return the reasons for passing over steps, those of the newest steps first."""
    told = [f"step {step}: {passed[step].reason}" for step in sorted(passed, reverse=True)]
    more = len(told) - _MOST_TOLD
    return " | ".join(told[:_MOST_TOLD]) + (f" | and {more} more" if more > 0 else "")
