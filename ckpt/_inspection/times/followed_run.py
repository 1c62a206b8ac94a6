"""A run in progress: its new steps, and its attempts with the bytes written so far.

Nothing is written to the root, so nothing is pinned: a step may be deleted right after it was seen.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from msgspec import Struct

from ckpt._format.history import left_behind
from ckpt._format.metrics import flat_metrics
from ckpt._inspection.json_values import finite
from ckpt._inspection.locations import RunRoot, open_as_root
from ckpt._inspection.times.save_times import times_of
from ckpt._runtime.threads import run_in_thread
from ckpt._steps.index import IndexedStep
from ckpt._steps.opened import open_step
from ckpt.errors import CheckpointError, StepNotFoundError, StorageError
from ckpt.storage._local.sweep import attempt_name
from ckpt.storage._resolve import local_path

# Text between the name of a step and the id of its attempt.
_MARK = attempt_name("", "")
_ID_DIGITS = 32


class SeenStep(Struct, frozen=True, tag_field="event", tag="step"):
    """A step that was committed.

    Attributes:
        step: Its number.
        committed: Time of its commit (UTC), if known.
        stored_bytes: Bytes of its files, including the manifest; None if another library wrote it.
        rate: Bytes per second at which it was written.
        blocked: Seconds for which the save blocked.
        written: Seconds from the call of the save until all data was durable.
        metrics: Metrics by name; None for values that are not finite.
        overwritten: True if it replaces a step of the same number.
    """

    step: int
    committed: datetime | None
    stored_bytes: int | None
    rate: float | None
    blocked: float | None
    written: float | None
    metrics: dict[str, float | None]
    overwritten: bool


class SeenAttempt(Struct, frozen=True, tag_field="event", tag="attempt"):
    """A save in progress, as seen from outside.

    Attributes:
        step: The step that it may become.
        id: Random id of the attempt.
        nbytes: Bytes of its files so far; a file counts as a whole once its space is allocated.
        expected_bytes: Bytes of the step before it, or None.
        seconds: Time since it was first seen.
        still_seconds: Time since it last grew.
    """

    step: int
    id: str
    nbytes: int
    expected_bytes: int | None
    seconds: float
    still_seconds: float


class GoneAttempt(Struct, frozen=True, tag_field="event", tag="gone"):
    """An attempt that disappeared without becoming a step."""

    step: int
    id: str


class Look(Struct, frozen=True):
    """The news about a run from one look.

    Attributes:
        steps: New steps, ascending.
        attempts: Saves in progress.
        gone: Attempts that ended without a step.
    """

    steps: Sequence[SeenStep] = ()
    attempts: Sequence[SeenAttempt] = ()
    gone: Sequence[GoneAttempt] = ()


class _Growth(Struct):
    step: int
    began: float
    grown: float
    nbytes: int = -1


class FollowedRun:
    """A run that is looked at repeatedly. Its coroutines must run on one event loop."""

    def __init__(self, path: str) -> None:
        """Follow the run at a path or URL, whose root need not exist yet."""
        self._path = path
        self._local = local_path(path)
        self._root: RunRoot | None = None
        self._seen: dict[int, IndexedStep] = {}
        self._growing: dict[str, _Growth] = {}
        self._last_bytes: int | None = None

    @property
    def latest(self) -> int | None:
        """The greatest step that was seen, except those that the run went back behind, or None."""
        behind = left_behind(self._seen.values())
        branch = (step for step, each in self._seen.items() if each.created_ns not in behind)
        return max(branch, default=None)

    @property
    def count(self) -> int:
        """Number of steps that were seen."""
        return len(self._seen)

    async def begin(self, after: int | None) -> None:
        """Mark existing steps as seen: those up to `after`, or all if it is None.

        Raises:
            CheckpointError: There cannot be a root at the path.
        """
        found = await self._index()
        self._seen = {step: each for step, each in found.items() if after is None or step <= after}
        for each in self._seen.values():
            self._last_bytes = each.stored_bytes

    async def look(self) -> Look:
        """Return the news since the last look.

        Raises:
            StorageError: The root cannot be read.
        """
        # Attempts are listed first: one that becomes a step meanwhile is then seen as both, not as
        # lost.
        attempts = await self._attempts()
        found = await self._index()
        steps = []
        for step, each in found.items():
            known = self._seen.get(step)
            if known is not None and known.attempt == each.attempt:
                continue
            seen = await self._opened(each, known is not None)
            if seen is not None:
                self._seen[step] = each
                self._last_bytes = seen.stored_bytes
                steps.append(seen)
        committed = {each.attempt for each in found.values()}
        now = time.monotonic()
        under_way, gone = [], []
        for token, growth in list(self._growing.items()):
            if token in committed:
                del self._growing[token]
            elif token not in attempts:
                del self._growing[token]
                gone.append(GoneAttempt(growth.step, token))
        for token, (step, nbytes) in attempts.items():
            if token in committed:
                continue
            growth = self._growing.setdefault(token, _Growth(step, now, now))
            if nbytes != growth.nbytes:
                growth.nbytes, growth.grown = nbytes, now
            under_way.append(
                SeenAttempt(
                    step, token, nbytes, self._last_bytes, now - growth.began, now - growth.grown
                )
            )
        return Look(steps, under_way, gone)

    async def _index(self) -> dict[int, IndexedStep]:
        if self._root is None or not self._seen:
            # The naming scheme of the steps shows only when there are some.
            try:
                self._root = await open_as_root(self._path)
            except StepNotFoundError:
                return {}
        try:
            return await self._root.index.refresh()
        except StorageError:
            if self._local is not None and not self._local.exists():
                return {}
            raise

    async def _opened(self, each: IndexedStep, overwritten: bool) -> SeenStep | None:
        assert self._root is not None
        try:
            opened = await open_step(self._root.storage, each.step_dir, each.step)
        except CheckpointError:
            # A step that is damaged or replaced just now is looked at again next time.
            return None
        if opened is None:
            return None
        times = times_of(opened)
        return SeenStep(
            each.step,
            times.committed,
            times.stored_bytes,
            times.rate,
            times.blocked,
            times.written,
            finite(flat_metrics(opened.manifest.metrics)),
            overwritten,
        )

    async def _attempts(self) -> dict[str, tuple[int, int]]:
        """Return step and bytes of the attempts by id; only those on a disk can be seen."""
        if self._local is None or self._root is None:
            return {}
        found = {}
        for name in await run_in_thread(_attempt_names, self._local):
            step_dir, _, token = name.rpartition(_MARK)
            step = self._root.names.step(step_dir)
            if step is None:
                continue
            # The attempt may be published, and so renamed, at any moment.
            with contextlib.suppress(StorageError):
                files = await self._root.storage.files(name)
                found[token] = (step, sum(size or 0 for size in files.values()))
        return found


def _attempt_names(root: Path) -> list[str]:
    try:
        with os.scandir(root) as entries:
            names = [each.name for each in entries if _MARK in each.name]
    except FileNotFoundError:
        return []
    # Names with more behind the id belong to trash of attempts.
    return [name for name in names if len(name.rpartition(_MARK)[2]) == _ID_DIGITS]
