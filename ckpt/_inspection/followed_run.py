"""Runs as they go on, or as a file recorded them: new steps, attempts and the timeline.

A run in progress: its new steps, and its attempts with the bytes written so far. Nothing is written
to the root, so nothing is pinned: a step may be deleted right after it was seen.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path

import msgspec
from msgspec import Struct, field

from ckpt._events import Event, Outcome
from ckpt._format.manifest_head import flat_metrics, left_behind
from ckpt._inspection.json_values import finite
from ckpt._inspection.locations import RunRoot, open_as_root
from ckpt._inspection.save_times import times_of
from ckpt._runtime.threads import run_in_thread
from ckpt._steps.index import IndexedStep
from ckpt._steps.opened import open_step
from ckpt.errors import CheckpointError, InvalidArgumentError, StepNotFoundError, StorageError
from ckpt.observers._tracing.timeline import END, Span, Timeline
from ckpt.storage._local.leases import attempt_name
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


# A line whose clock is off by more than this belongs to another process or another boot.
_SAME_CLOCK_NS = 1_000_000_000


class _Line(Struct, frozen=True):
    """A line of the file: an event, or a span of the user."""

    time: float
    seconds: float
    operation: str = ""
    phase: str = ""
    step: int | None = None
    nbytes: int = 0
    lane: int | None = None
    batch: int | None = None
    outcome: Outcome | None = None
    reason: str | None = None
    span: str | None = None
    thread: str = ""
    args: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    clock_ns: int | None = None


class RecordedTrace(Struct, frozen=True):
    """The contents of a trace file.

    Attributes:
        timeline: Its events and spans; their times count from 1970.
        unreadable: Number of lines that are not an observer's, such as a truncated one.
    """

    timeline: Timeline
    unreadable: int


def read_trace(path: str | os.PathLike[str]) -> RecordedTrace:
    """Return the timeline of a file.

    Raises:
        StorageError: The file cannot be read.
        InvalidArgumentError: No line is an observer's, or the file was written without phases.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            found = parse_trace(file)
    except OSError as error:
        raise StorageError(
            f"cannot read {Path(path)}: {error.strerror or error}", errno=error.errno
        ) from error
    events = found.timeline.events
    if not events:
        raise InvalidArgumentError(
            f"{Path(path)} holds no events. Give the file that an observer "
            "ckpt.observers.JsonLines(path, phases=True) has written"
        )
    if all(event.phase == END for event in events):
        raise InvalidArgumentError(
            f"{Path(path)} was written without phases. Record it with "
            "ckpt.observers.JsonLines(path, phases=True)"
        )
    return found


def parse_trace(lines: Iterable[str]) -> RecordedTrace:
    """Return the timeline of some lines."""
    events: list[Event] = []
    spans: list[Span] = []
    unreadable = 0
    offset: int | None = None
    for text in lines:
        line = _parsed(text)
        if line is None:
            unreadable += bool(text.strip())
            continue
        ended = round(line.time * 1e9)
        if line.clock_ns is not None:
            # All lines of a process get the same offset, so that they keep their order.
            own = ended - line.clock_ns
            offset = own if offset is None or abs(own - offset) > _SAME_CLOCK_NS else offset
            ended = line.clock_ns + offset
        began = ended - round(line.seconds * 1e9)
        if line.span is not None:
            spans.append(Span(line.span, began, ended, line.thread, line.args))
            continue
        events.append(
            Event(
                line.operation,
                line.phase,
                line.step,
                began,
                ended,
                line.nbytes,
                line.lane,
                line.batch,
                line.outcome,
                line.reason,
            )
        )
    return RecordedTrace(Timeline(tuple(events), tuple(spans)), unreadable)


def _parsed(text: str) -> _Line | None:
    try:
        # msgspec refuses texts with half a surrogate pair, which paths may contain.
        line = msgspec.convert(json.loads(text), _Line)
    except (ValueError, RecursionError, msgspec.ValidationError):
        return None
    is_whole = line.span is not None or (line.operation and line.phase)
    # Times before 1970 or after 2200 are errors.
    times = math.isfinite(line.time) and 0 <= line.time < 1 << 33 and 0 <= line.seconds < 1 << 33
    return line if is_whole and times and line.nbytes >= 0 else None
