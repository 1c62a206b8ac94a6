"""The trash of one root: what is in it, and how it comes back or goes for good."""

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

# Longer ago than anything.
_LONGEST_SECONDS = 1e10


@dataclass(frozen=True, slots=True)
class TrashedStep:
    """A step in the trash.

    Attributes:
        step: The step.
        deleted: When it was deleted; timezone-aware, in UTC.
        path: Where it is, for messages: its directory, or in a bucket its manifest.
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
        """Look into the folder `trash` of `storage`; None if steps are deleted for good."""
        self._storage = storage
        self._index = index
        self._names = names
        self._trash = trash
        self._now_ns = now_ns

    async def steps(self) -> list[TrashedStep]:
        """Return what is in the trash, by step and then by time."""
        found = [
            TrashedStep(step, _time_of(entry), entry.path)
            for step, entries in (await self._entries()).items()
            for entry in entries
        ]
        return sorted(found, key=lambda each: (each.step, each.deleted))

    async def saves_of(self, step: int) -> list[str]:
        """Return what tells the steps of this number in the trash apart, the latest last.

        Raises:
            StepExistsError: The step exists, by whichever of its names.
        """
        for step_dir in await self._index.step_dirs_of(step):
            if await self._index.look(step_dir) is not None:
                with located(step=step):
                    raise undelete_exists(f"{self._storage.location}/{step_dir}")
        return [_save_of(entry) for entry in (await self._entries()).get(step, [])]

    async def missing(self, step: int) -> StepNotFoundError:
        """Return the error for a step that is not in the trash, which says what is."""
        steps = shortened(list(await self._entries())) or "no step"
        return StepNotFoundError(
            f"it is not in the trash of {self._storage.location}, which holds {steps}", step=step
        )

    async def undelete(self, step: int, save: str) -> str:
        """Make a step of what is in the trash; return its path.

        Args:
            step: The step.
            save: Which one of that number, of `saves_of`.

        Raises:
            StepNotFoundError: It is not there any more.
            StepExistsError: The step exists again.
            CorruptCheckpointError: Files of it are missing.
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
        """Remove what was deleted at least that many seconds ago; return the steps."""
        trash, began = self._folder(), time.perf_counter()
        latest_ns = self._now_ns() - int(min(older_than, _LONGEST_SECONDS) * 1e9)
        removed = []
        for step, entries in (await self._entries()).items():
            for entry in entries:
                # Clocks of machines differ, and all of it is all of it.
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
        """Return what is in the trash by step, and of each step the latest last."""
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
                "this manager deletes steps for good. Open it with deletion="
                'ckpt.policies.Deletion(trash="trash"), and steps that are deleted from then on '
                "can be taken back"
            )
        return self._trash


def _save_of(entry: TrashEntry) -> str:
    # Where every process has its own disk, the copies of a save have that in common.
    return entry.save or entry.name


def _time_of(entry: TrashEntry) -> datetime:
    return datetime.fromtimestamp(entry.deleted_ns / 1e9, UTC)
