"""A run while it goes on: its new steps, and its attempts with the bytes that they have so far.

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

from ckpt._format.metrics import flat_metrics
from ckpt._inspection.json_values import finite
from ckpt._inspection.places import RunRoot, open_as_root
from ckpt._inspection.times.save_times import times_of
from ckpt._runtime.threads import run_in_thread
from ckpt._steps.index import IndexedStep, left_behind
from ckpt._steps.opened import open_step
from ckpt.errors import CheckpointError, StepNotFoundError, StorageError
from ckpt.storage._local.sweep import attempt_name
from ckpt.storage._resolve import local_path

# What stands between the name of a step and the id of its attempt.
_MARK = attempt_name("", "")
_ID_DIGITS = 32


class SeenStep(Struct, frozen=True, tag_field="event", tag="step"):
    """A step that was committed.

    Attributes:
        step: Its number.
        committed: When (UTC), if that is known.
        stored_bytes: Bytes of its files, of the manifest, too; None of what another library wrote.
        rate: Bytes per second at which it was written.
        blocked: Seconds for which the save blocked.
        written: Seconds from the call of the save until all data was durable.
        metrics: Metrics by name; those that are not finite are None.
        overwritten: Whether it replaces a step of the same number.
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
    """A save under way, as it can be seen from outside.

    Attributes:
        step: The step that it may become.
        id: The random id of the attempt.
        nbytes: Bytes of its files so far; a file counts as a whole once it has its space.
        expected_bytes: Bytes of the step before it, or None.
        seconds: How long it has been seen.
        still_seconds: How long it has not grown.
    """

    step: int
    id: str
    nbytes: int
    expected_bytes: int | None
    seconds: float
    still_seconds: float


class GoneAttempt(Struct, frozen=True, tag_field="event", tag="gone"):
    """An attempt that is gone and has not become a step."""

    step: int
    id: str


class Look(Struct, frozen=True):
    """What one look at a run has found.

    Attributes:
        steps: New steps, ascending.
        attempts: Saves under way.
        gone: Attempts that have ended without a step.
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
    """A run that is looked at again and again. Its coroutines run on one event loop."""

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
        """The greatest step that was seen, but for those that the run went back behind, or None."""
        behind = left_behind(self._seen.values())
        branch = (step for step, each in self._seen.items() if each.created_ns not in behind)
        return max(branch, default=None)

    @property
    def count(self) -> int:
        """How many steps were seen."""
        return len(self._seen)

    async def begin(self, after: int | None) -> None:
        """Take the steps that exist as seen, but those greater than `after`; None for all.

        Raises:
            CheckpointError: There cannot be a root.
        """
        found = await self._index()
        self._seen = {step: each for step, each in found.items() if after is None or step <= after}
        for each in self._seen.values():
            self._last_bytes = each.stored_bytes

    async def look(self) -> Look:
        """Return what is new.

        Raises:
            StorageError: The root cannot be read.
        """
        # Attempts come first: one that becomes a step meanwhile is seen as both, not as lost.
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
            # How the steps are named shows only when there are some.
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
            # What is damaged or replaced just now is looked at again.
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
        """Return step and bytes of the attempts by id, where they can be seen: on a disk."""
        if self._local is None or self._root is None:
            return {}
        found = {}
        for name in await run_in_thread(_attempt_names, self._local):
            step_dir, _, token = name.rpartition(_MARK)
            step = self._root.names.step(step_dir)
            if step is None:
                continue
            # It may be published, and so renamed, at any moment.
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
    # Trash of an attempt has an ending.
    return [name for name in names if len(name.rpartition(_MARK)[2]) == _ID_DIGITS]
