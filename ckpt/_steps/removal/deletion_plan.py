"""Deletions: what is not kept of steps and items, on one disk or on all, and the trash."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from msgspec import Struct, field

from ckpt._redaction import redact
from ckpt._steps.index import IndexedStep, StepIndex
from ckpt._steps.opened import shortened
from ckpt.errors import InvalidArgumentError, StepNotFoundError, located
from ckpt.keep._keep_policies import All, KeepRules, steps_kept
from ckpt.keep._questions import SavedStep
from ckpt.step_names import StepNames
from ckpt.storage._base import Storage, TrashEntry, undelete_exists

logger = logging.getLogger("ckpt")


class DeletionPlan(Struct, frozen=True):
    """The steps and items that are to be deleted.

    Attributes:
        steps: Steps that go as a whole.
        items: If items have policies: by step the items that go, each with the text of its policy;
            all items for a step that goes as a whole.
        found: The steps that items go from.
    """

    steps: Mapping[int, IndexedStep] = field(default_factory=dict)
    items: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    found: Mapping[int, IndexedStep] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.steps or self.items)

    def losing(self) -> dict[int, Mapping[str, str]]:
        """Return the steps that stay but lose items, with these items."""
        return {step: gone for step, gone in self.items.items() if step not in self.steps}

    def where(self, goes: Callable[[int], bool]) -> DeletionPlan:
        """Return the part of the plan for the steps for which `goes` is true."""
        return DeletionPlan(
            {step: each for step, each in self.steps.items() if goes(step)},
            {step: each for step, each in self.items.items() if goes(step)},
            {step: each for step, each in self.found.items() if goes(step)},
        )


def keeps_all(policy: KeepRules) -> bool:
    """Return True if nothing is ever superfluous by a policy."""
    policies = policy.values() if isinstance(policy, Mapping) else [policy]
    return all(isinstance(each, All) for each in policies)


def plan_deletions(
    policy: KeepRules,
    found: Mapping[int, IndexedStep],
    steps: Sequence[SavedStep],
    now: float,
    always: Collection[int | None],
) -> DeletionPlan:
    """Return the steps and items that a policy does not keep.

    Args:
        policy: The policy, or a policy for each item.
        found: The committed steps, ascending.
        steps: The same steps in the form that policies take.
        now: Unix seconds.
        always: Steps that stay whole.

    Raises:
        InvalidArgumentError: A policy has raised an error, or given no valid answer.
    """
    if not isinstance(policy, Mapping):
        kept = {*steps_kept(policy, steps, now), *always}
        return DeletionPlan({step: each for step, each in found.items() if step not in kept})
    from ckpt.keep._by_item import leaving

    items = {step: each.items for step, each in found.items()}
    gone = leaving(policy, steps, items, now, always)
    return DeletionPlan(
        {step: found[step] for step in sorted(gone.steps)},
        gone.items,
        {step: found[step] for step in gone.items},
    )


def kept_items(found: Mapping[int, IndexedStep], own: DeletionPlan) -> list[tuple[int, list[str]]]:
    """Return the steps that stay, each with the items that stay."""
    return [
        (step, [item for item in each.items if item not in own.items.get(step, ())])
        for step, each in found.items()
        if step not in own.steps
    ]


def common_deletions(
    own: DeletionPlan, kept: Iterable[Iterable[tuple[int, Iterable[str]]]]
) -> DeletionPlan:
    """Return what goes from the disk of this process, if every process has its own disk.

    Whatever one process keeps stays on all disks. An item that one disk has lost already goes from
    the other disks, too.

    Args:
        own: The plan of this process alone.
        kept: The `kept_items` of each process, about the same steps.
    """
    stay: dict[int, set[str]] = {}
    for each in kept:
        for step, names in each:
            stay.setdefault(step, set()).update(names)
    left = {
        step: {item: text for item, text in gone.items() if item not in stay.get(step, ())}
        for step, gone in own.items.items()
    }
    # If a disk has none of the items that the others keep, leave its step unchanged.
    lost = {
        step: gone
        for step, gone in left.items()
        if gone and (step not in stay or len(gone) < len(own.found[step].items))
    }
    return DeletionPlan(
        {step: each for step, each in own.steps.items() if step not in stay},
        lost,
        {step: own.found[step] for step in lost},
    )


# Longer than any step can have been in the trash.
_LONGEST_SECONDS = 1e10


@dataclass(frozen=True, slots=True)
class TrashedStep:
    """A step in the trash.

    Attributes:
        step: The step.
        deleted: Time of the deletion; timezone-aware, in UTC.
        path: Path of its directory, or in a bucket of its manifest; for messages.
    """

    step: int
    deleted: datetime
    path: str


class StepTrash:
    """The trash of one root. Its coroutines run on the engine's loop."""

    def __init__(
        self,
        storage: Storage,
        index: StepIndex,
        names: StepNames,
        trash: str | None,
        now_ns: Callable[[], int],
    ) -> None:
        """Use the folder `trash` of `storage`; None if steps are deleted permanently."""
        self._storage = storage
        self._index = index
        self._names = names
        self._trash = trash
        self._now_ns = now_ns

    async def steps(self) -> list[TrashedStep]:
        """Return the steps in the trash, ordered by step, then by time of deletion."""
        found = [
            TrashedStep(step, datetime.fromtimestamp(entry.deleted_ns / 1e9, UTC), entry.path)
            for step, entries in (await self._entries()).items()
            for entry in entries
        ]
        return sorted(found, key=lambda each: (each.step, each.deleted))

    async def saves_of(self, step: int) -> list[str]:
        """Return the ids of the saves of this step in the trash, the latest last.

        Raises:
            StepExistsError: The step exists, under any of its names.
        """
        for step_dir in await self._index.step_dirs_of(step):
            if await self._index.look(step_dir) is not None:
                with located(step=step):
                    raise undelete_exists(f"{self._storage.location}/{step_dir}")
        return [_save_of(entry) for entry in (await self._entries()).get(step, [])]

    async def missing(self, step: int) -> StepNotFoundError:
        """Return the error for a step that is not in the trash; it lists the steps that are."""
        steps = shortened(list(await self._entries())) or "no step"
        return StepNotFoundError(
            f"it is not in the trash of {self._storage.location}, which holds {steps}", step=step
        )

    async def undelete(self, step: int, save: str) -> str:
        """Take a step back from the trash; return its path.

        Args:
            step: The step.
            save: Id of the save, from `saves_of`.

        Raises:
            StepNotFoundError: The step is no longer in the trash.
            StepExistsError: The step exists again.
            CorruptCheckpointError: Files of the step are missing.
        """
        entries = (await self._entries()).get(step, [])
        entry = next((each for each in reversed(entries) if _save_of(each) == save), None)
        if entry is None:
            raise await self.missing(step)
        with located(step=step):
            await self._storage.undelete(self._folder(), entry.name, entry.step_dir)
        logger.info("step %d of %s was undeleted", step, redact(self._storage.location))
        return f"{self._storage.location}/{entry.step_dir}"

    async def empty(self, older_than: float) -> list[int]:
        """Remove steps that were deleted at least so many seconds ago; return their numbers."""
        trash, began = self._folder(), time.perf_counter()
        latest_ns = self._now_ns() - int(min(older_than, _LONGEST_SECONDS) * 1e9)
        removed = []
        for step, entries in (await self._entries()).items():
            for entry in entries:
                # Clocks of machines differ: 0 seconds must remove everything.
                if not older_than or entry.deleted_ns <= latest_ns:
                    with located(step=step):
                        await self._storage.purge(trash, entry.name)
                    removed.append(step)
        if removed:
            seconds = time.perf_counter() - began
            steps = shortened(sorted(set(removed)))
            logger.info("removed from the trash: %s (%.2f s)", steps, seconds)
        return sorted(removed)

    async def _entries(self) -> Mapping[int, list[TrashEntry]]:
        """Return the entries of the trash by step; for each step, the latest entry is last."""
        found: dict[int, list[TrashEntry]] = {}
        for entry in await self._storage.trashed(self._folder()):
            step = self._names.step(entry.step_dir)
            if step is not None:
                found.setdefault(step, []).append(entry)
        return {
            step: sorted(found[step], key=lambda each: each.deleted_ns) for step in sorted(found)
        }

    def _folder(self) -> str:
        if self._trash is None:
            raise InvalidArgumentError(
                'this manager deletes steps for good. Open it with trash="trash", and steps that '
                "are deleted from then on can be taken back"
            )
        return self._trash


def _save_of(entry: TrashEntry) -> str:
    # If every process has its own disk, all copies of a save have the same `save`.
    return entry.save or entry.name
