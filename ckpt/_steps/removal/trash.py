"""The trash of one root: what is in it, and how it comes back or goes for good."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from ckpt._redaction import redact
from ckpt._steps.unreadable import shortened
from ckpt.errors import InvalidArgumentError, StepNotFoundError, located
from ckpt.step_names import StepNames
from ckpt.storage._base import Storage, TrashEntry

logger = logging.getLogger("ckpt")

# A name that was taken in the trash already has a number behind it.
_NUMBERED = re.compile(r"^(.+)-[0-9]+\Z")


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
        self, storage: Storage, names: StepNames, trash: str | None, now_ns: Callable[[], int]
    ) -> None:
        """Look into the folder `trash` of `storage`; None if steps are deleted for good."""
        self._storage = storage
        self._names = names
        self._trash = trash
        self._now_ns = now_ns

    async def steps(self) -> list[TrashedStep]:
        """Return what is in the trash, by step and then by time."""
        found = [
            TrashedStep(step, _time_of(entry), f"{self._storage.location}/{entry.path}")
            for step, entries in (await self._entries()).items()
            for entry in entries
        ]
        return sorted(found, key=lambda each: (each.step, each.deleted))

    async def undelete(self, step: int) -> None:
        """Make a step of the one in the trash that was deleted last.

        Raises:
            StepNotFoundError: There is none; says which there are.
            StepExistsError: The step exists again.
            CorruptCheckpointError: Files of it are missing.
        """
        trash = self._folder()
        entries = await self._entries()
        if step not in entries:
            steps = shortened(sorted(entries)) or "no step"
            raise StepNotFoundError(
                f"it is not in the trash of {self._storage.location}, which holds {steps}",
                step=step,
            )
        last = max(entries[step], key=lambda each: each.deleted_ns)
        with located(step=step):
            await self._storage.undelete(trash, last.name, self._step_dir_of(last)[0])
        logger.info("step %d of %s was undeleted", step, redact(self._storage.location))

    async def empty(self, older_than: float) -> list[int]:
        """Remove what was deleted at least that many seconds ago; return the steps."""
        trash, began = self._folder(), time.perf_counter()
        latest_ns = self._now_ns() - int(older_than * 1e9)
        removed = []
        for step, entries in (await self._entries()).items():
            for entry in entries:
                if entry.deleted_ns <= latest_ns:
                    with located(step=step):
                        await self._storage.purge(trash, entry.name)
                    removed.append(step)
        if removed:
            seconds = time.perf_counter() - began
            steps = shortened(sorted(set(removed)))
            logger.info("removed from the trash: %s (%.2f s)", steps, seconds)
        return sorted(removed)

    async def _entries(self) -> Mapping[int, list[TrashEntry]]:
        found: dict[int, list[TrashEntry]] = {}
        for entry in await self._storage.trashed(self._folder()):
            _, step = self._step_dir_of(entry)
            # Others may have put files there.
            if step is not None:
                found.setdefault(step, []).append(entry)
        return dict(sorted(found.items()))

    def _step_dir_of(self, entry: TrashEntry) -> tuple[str, int | None]:
        """Return the directory that an entry was, and its step; None if it was no step."""
        step = self._names.step(entry.step_dir)
        numbered = _NUMBERED.match(entry.step_dir)
        if step is None and numbered is not None:
            return numbered[1], self._names.step(numbered[1])
        return entry.step_dir, step

    def _folder(self) -> str:
        if self._trash is None:
            raise InvalidArgumentError(
                "this manager deletes steps for good. Open it with deletion="
                'ckpt.policies.Deletion(trash="trash"), and steps that are deleted from then on '
                "can be taken back"
            )
        return self._trash


def _time_of(entry: TrashEntry) -> datetime:
    return datetime.fromtimestamp(entry.deleted_ns / 1e9, UTC)
