"""The trash of one root: listing it, taking steps back from it, and emptying it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from ckpt._redaction import redact
from ckpt._steps.index import StepIndex
from ckpt._steps.unreadable import shortened
from ckpt.errors import InvalidArgumentError, StepNotFoundError, located
from ckpt.step_names import StepNames
from ckpt.storage._base import Storage, TrashEntry, undelete_exists

logger = logging.getLogger("ckpt")

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
            TrashedStep(step, _time_of(entry), entry.path)
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


def _time_of(entry: TrashEntry) -> datetime:
    return datetime.fromtimestamp(entry.deleted_ns / 1e9, UTC)
