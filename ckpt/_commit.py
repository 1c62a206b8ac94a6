"""`Commit`: the handle of a save that goes on in the background, and the facts about a step."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import msgspec

from ckpt._format.manifest import Manifest
from ckpt._format.manifest_head import DroppedItem, Parent, flat_metrics
from ckpt._runtime.futures import outcome, settled, settled_here
from ckpt._tree.table import format_bytes
from ckpt.errors import CommitTimeoutError, InvalidArgumentError, NotInRootError, SaveSkippedError
from ckpt.keep._questions import NO_NOTES, notes_in

logger = logging.getLogger("ckpt")

Stage = Literal["waiting", "staging", "writing", "publishing", "done", "failed", "skipped"]
# The stages that may follow each one; the others are ends. Of a save in parts, one is staged while
# others are written. A step without items is refused when it would be published.
NEXT_STAGES: dict[Stage, tuple[Stage, ...]] = {
    "waiting": ("staging", "publishing", "skipped", "failed"),
    "staging": ("writing", "skipped", "failed"),
    "writing": ("staging", "publishing", "skipped", "failed"),
    "publishing": ("done", "skipped", "failed"),
}
# Times that a manifest holds.
_EARLY = ("blocked", "waited", "staged", "written")


@dataclass(frozen=True, slots=True)
class SaveStatistics:
    """The times of a save, in seconds, and the bytes that it did not have to write.

    A time is None if it is not known. A commit has all of them. The manifest of a step is written
    before the last two are known, so the metadata of a step lacks these two.

    Attributes:
        blocked: From the call of `save` until it could return.
        waited: Waiting for earlier saves: for their snapshots before this one's, and for their
            commits before anything was written.
        staged: From the call of `save` until everything was in host memory.
        written: From the call of `save` until all data was durable.
        merged: Writing the files that tie the step together: views and manifest.
        published: Giving the step its name, durably.
        shared_bytes: Bytes of its data files that the step before has, too: they hold arrays that
            did not change, and were not written again.

    Example:
        ```python
        statistics = (await mgr.metadata(100)).info.statistics
        print(statistics.blocked, statistics.written)
        ```
    """

    blocked: float | None = None
    waited: float | None = None
    staged: float | None = None
    written: float | None = None
    merged: float | None = None
    published: float | None = None
    shared_bytes: int = 0


class Stopwatch(msgspec.Struct):
    """Takes the times of one save while it goes on.

    Attributes:
        began: Time of the call, by `time.perf_counter`.
    """

    began: float = msgspec.field(default_factory=time.perf_counter)
    taken: SaveStatistics = msgspec.field(default_factory=SaveStatistics)

    @property
    def elapsed(self) -> float:
        """Seconds since the save was called."""
        return _since(self.began)

    def note(self, **seconds: float) -> None:
        """Set times, by the names of `SaveStatistics`."""
        taken: dict[str, Any] = {**seconds}
        self.taken = replace(self.taken, **taken)

    @contextlib.contextmanager
    def taking(self, name: str) -> Iterator[None]:
        """Take the time of the body under a name of `SaveStatistics`."""
        began = time.perf_counter()
        yield
        self.add(name, began)

    def add(self, name: str, began: float) -> None:
        """Add the time since `began` to a time, by its name of `SaveStatistics`."""
        self.note(**{name: (getattr(self.taken, name) or 0.0) + _since(began)})

    def early(self) -> dict[str, float]:
        """Return the times that are known before the manifest is written, for the manifest."""
        return {name: t for name in _EARLY if (t := getattr(self.taken, name)) is not None}


def _since(began: float) -> float:
    # On some virtual machines this clock goes back. A manifest with a negative time is refused, and
    # no save should fail for a statistic.
    return max(time.perf_counter() - began, 0.0)


@dataclass(frozen=True, slots=True, repr=False)
class StepInfo:
    """The summary of a committed step, which needs no reading of its arrays.

    Attributes:
        step: The step, or None for a one-shot checkpoint.
        path: Path or URL of the step.
        nbytes: Logical bytes of its arrays.
        items: Names of its items.
        metrics: Metrics given to `save`; those in groups as `train/loss`.
        custom_metadata: JSON values given to `save`, or None.
        parent: The checkpoint that the run began from, if `resume(source=...)` named one.
        created: Time at which the save began (UTC).
        committed: Time at which the step was committed (UTC).
        statistics: Times of the save.
        nonfinite_leaves: Number of leaves with NaN or infinite values; None if unknown.
        unequal_leaves: Number of leaves whose replicas differed, as far as devices compared them.
        dropped: The items that were taken out of the step after it was committed.
        tiers: The places that have it, the nearest first, for a manager with `tiers`; else empty.

    Example:
        ```python
        info = await mgr.save(step, state, durable=True)
        print(info.path, info.nbytes, info.committed)
        ```
    """

    step: int | None
    path: str
    nbytes: int
    items: tuple[str, ...]
    metrics: dict[str, float]
    custom_metadata: Any
    created: datetime
    committed: datetime
    statistics: SaveStatistics = field(default_factory=SaveStatistics, compare=False)
    parent: Parent | None = None
    nonfinite_leaves: int | None = None
    unequal_leaves: int = 0
    dropped: tuple[DroppedItem, ...] = ()
    tiers: tuple[str, ...] = ()

    def __repr__(self) -> str:
        name = "" if self.step is None else f"step {self.step}, "
        metrics = "".join(f"{key}={value:.6g}, " for key, value in self.metrics.items())
        when = f"{self.committed:%Y-%m-%d %H:%M:%S} UTC"
        return f"StepInfo({name}{format_bytes(self.nbytes)}, {metrics}{when}, {self.path!r})"

    @staticmethod
    def time_of(unix_ns: int) -> datetime:
        """Return the UTC time of a manifest's time stamp."""
        return datetime.fromtimestamp(unix_ns / 1e9, UTC)


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a save, in bytes of array data as they are stored, with padding.

    Attributes:
        staged: Bytes in the snapshot, which no action of the caller can change.
        written: Bytes that are durable, though not yet published.
        total: Bytes of the whole save; 0 until it is planned.

    Example:
        ```python
        print(f"{commit.progress.fraction:.0%} of {commit.progress.total} bytes")
        ```
    """

    staged: int = 0
    written: int = 0
    total: int = 0

    @property
    def fraction(self) -> float:
        """Written share, 0.0 to 1.0."""
        return self.written / self.total if self.total else 0.0


class Commit:
    """A save under way, or ended.

    Await it for the `StepInfo` of the durable step, or for the error of this save: from any task of
    any event loop, from any thread through `result()`, any number of times. The error of a failed
    save is logged at once. A program has checked it once it awaits the commit, or calls `result()`
    or `exception()`. If it has not, the next `save` of the manager raises the error, else the
    manager's exit does. A commit is falsy if its save has failed, or was turned down by a policy:
    then `skipped` says why, and awaiting it is an error.

    Cancelling a task that awaits a commit leaves the commit as it is; `cancel()` cancels it.

    Example:
        ```python
        commit = await mgr.save(step, state)
        info = await commit
        ```
    """

    def __init__(
        self,
        step: int | None,
        cancel: Callable[[], None],
        check_caller: Callable[[], None] = lambda: None,
        items: Iterable[str] = (),
    ) -> None:
        """Made by a manager; `check_caller` raises where waiting for the engine would never end."""
        self.step = step
        self._cancel = cancel
        self._check_caller = check_caller
        self._future: Future[StepInfo] = Future()
        self._in_root = CommitFuture(self, "the step was not in the root")
        self._items = {name: CommitFuture(self, f"item {name!r} was not durable") for name in items}
        self._guard = threading.Lock()
        self._stage: Stage = "waiting"
        self._progress = Progress()
        self._skipped: str | None = None
        # True if the save failed after its call had returned: the program has to get the error.
        self._owed = False
        self._seen = False
        # Number of calls that wait for the outcome now, and will see it.
        self._waiting = 0

    if not TYPE_CHECKING:

        def __getattr__(self, name):
            hint = ": await the commit, or call its result()" if name.startswith("wait") else ""
            raise AttributeError(f"'Commit' object has no attribute {name!r}{hint}")

    def __reduce__(self) -> NoReturn:
        raise InvalidArgumentError(
            "a commit cannot be pickled or copied: it has a thread and saves under way. Open a "
            "manager in each process"
        )

    @property
    def stage(self) -> Stage:
        """The present stage of the save."""
        return self._stage

    @property
    def progress(self) -> Progress:
        """The progress of the save."""
        return self._progress

    @property
    def skipped(self) -> str | None:
        """The reason if the save was turned down: a policy, or the step is there; else None."""
        return self._skipped

    @property
    def items(self) -> Mapping[str, CommitFuture]:
        """A future for each item, done when it is durable; one without a name is `default`."""
        return self._items

    @property
    def in_root(self) -> CommitFuture:
        """A future that is done when the step is in the root, the last place of a run with tiers.

        Without tiers of storage, that is when the commit itself is done.
        """
        return self._in_root

    def done(self) -> bool:
        """Return True if the save has ended: durable, failed, cancelled or skipped.

        Example:
            ```python
            if commit.done():
                print(commit.stage)
            ```
        """
        return self._future.done()

    def cancel(self) -> bool:
        """Ask for the save to be stopped; return False if it has ended already.

        Input and output that has begun is waited for. Then everything of the attempt is removed,
        and awaiting the commit raises `CommitCancelledError`. A save that is being published when
        the request arrives may still commit.

        Example:
            ```python
            commit.cancel()
            ```
        """
        if self.done():
            return False
        self._cancel()
        return True

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error of this save, or None; waits up to `timeout` seconds in this thread.

        Raises:
            CommitTimeoutError: The save had not ended in time.

        Example:
            ```python
            print(commit.exception(timeout=60))
            ```
        """
        self._wait(timeout)
        return self._future.exception()

    def result(self, timeout: float | None = None) -> StepInfo:
        """Return the `StepInfo` of the durable step, waiting in this thread.

        Args:
            timeout: Seconds to wait at most; None waits for as long as it takes.

        Raises:
            CommitTimeoutError: The save had not ended in time; it goes on.
            SaveSkippedError: The save was skipped, so there is no step.
            CheckpointError: The save failed.

        Example:
            ```python
            info = commit.result(timeout=60)
            print(info.path)
            ```
        """
        self._wait(timeout)
        return outcome(self._future)

    def add_done_callback(self, callback: Callable[[Commit], object]) -> None:
        """Call `callback(commit)` once the save has ended, at once if it has.

        It is called on the library's own thread and must return quickly; an exception it raises is
        logged.

        Example:
            ```python
            commit.add_done_callback(lambda commit: print(commit.step, commit.stage))
            ```
        """

        def call(_: Future[StepInfo]) -> None:
            try:
                callback(self)
            except Exception:
                logger.exception("a done callback of %r failed", self)

        self._future.add_done_callback(call)

    def __await__(self) -> Generator[Any, Any, StepInfo]:
        yield from self._settled(self._future)
        return outcome(self._future)

    def __bool__(self) -> bool:
        return self._stage not in ("skipped", "failed")

    def __repr__(self) -> str:
        share = f", {self._progress.fraction:.0%} written" if self._progress.total else ""
        return f"<Commit step={self.step} {self._stage}{share}>"

    def _wait(self, timeout: float | None) -> None:
        self._settle(self._future, timeout, lambda: f"the commit was still {self._stage}")

    def _settle(self, future: Future[Any], timeout: float | None, late: Callable[[], str]) -> None:
        """Wait for a future of this save in this thread; `late` is the text if it takes longer."""
        with self._seeing(future):
            if not settled_here(future, timeout):
                what = f"{late()} after {timeout} s; it goes on. Wait longer, or cancel() it"
                raise CommitTimeoutError(what, step=self.step)

    def _settled(self, future: Future[Any]) -> Generator[Any, Any, None]:
        """Wait for a future of this save in a task."""
        with self._seeing(future):
            yield from settled(future).__await__()

    @contextlib.contextmanager
    def _seeing(self, future: Future[Any]) -> Iterator[None]:
        """Count the caller of the body, who gets the outcome of `future`, if it is the save's."""
        if not future.done():
            self._check_caller()
        with self._awaited():
            yield
            self._seen |= self._future.done() and future.exception() is self._future.exception()

    @contextlib.contextmanager
    def _awaited(self) -> Iterator[None]:
        """Count the caller among those who will see the outcome."""
        with self._guard:
            self._waiting += 1
        try:
            yield
        finally:
            with self._guard:
                self._waiting -= 1


class CommitFuture:
    """A point of a save: an item is durable, or the step is in the root.

    Await it, from any task of any event loop, any number of times, or wait for it in a thread with
    `result()`. In a job, an item is durable when this process has written its part of it.

    Example:
        ```python
        commit = await mgr.save(step, items={"model": state, "note": "warm-up"})
        await commit.items["model"]
        ```
    """

    def __init__(self, commit: Commit, late: str) -> None:
        """Made by a `Commit`; `late` begins the error of a wait that is too short."""
        self._commit = commit
        self._late = late
        self._future: Future[None] = Future()

    def done(self) -> bool:
        """Return True if it is decided: the point is reached, or will not be.

        Example:
            ```python
            print(commit.in_root.done())
            ```
        """
        return self._future.done()

    def cancel(self) -> bool:
        """Ask for the whole save to be stopped, as `Commit.cancel` does.

        Example:
            ```python
            commit.items["default"].cancel()
            ```
        """
        return self._commit.cancel()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error that `result` would raise, or None; waits as that does.

        Example:
            ```python
            print(commit.items["default"].exception(timeout=60))
            ```
        """
        self._commit._settle(self._future, timeout, lambda: self._late)
        return self._future.exception()

    def result(self, timeout: float | None = None) -> None:
        """Wait in this thread until the point is reached.

        Args:
            timeout: Seconds to wait at most; None waits for as long as it takes.

        Raises:
            CommitTimeoutError: It was not reached in time; the save goes on.
            CheckpointError: The save failed.
            SaveSkippedError: The save was skipped.
            NotInRootError: The step stays where it is; the message says why.

        Example:
            ```python
            commit.in_root.result(timeout=600)
            ```
        """
        self._commit._settle(self._future, timeout, lambda: self._late)
        outcome(self._future)

    def __await__(self) -> Generator[Any, Any, None]:
        yield from self._commit._settled(self._future)
        outcome(self._future)


class CommitHooks:
    """The engine's side of a `Commit`: moves it along and ends it. Used on the engine's thread."""

    def __init__(self, commit: Commit) -> None:
        """Drive `commit`, whose save was called just now."""
        self.commit: Commit = commit
        self.watch: Stopwatch = Stopwatch()
        # True if its failure is reported by other means.
        self.is_excused = False

    def stage(self, stage: Stage) -> None:
        """Go on to the next stage of the save."""
        assert stage in NEXT_STAGES.get(self.commit._stage, ()), (self.commit, stage)
        self.commit._stage = stage

    def advance(self, *, staged: int = 0, written: int = 0, total: int = 0) -> None:
        now = self.commit._progress
        self.commit._progress = Progress(
            now.staged + staged, now.written + written, now.total + total
        )

    def durable(self, item: str) -> None:
        """Note that an item is durable."""
        if item in self.commit._items:
            self.commit._items[item]._future.set_result(None)

    def finish(self, info: StepInfo, *, in_root: bool = True) -> None:
        """End the save as durable; with `in_root`, the step has arrived in the root."""
        self.stage("done")
        self.commit._future.set_result(info)
        if in_root:
            arrived(self.commit)

    def skip(self, reason: str) -> None:
        """End the save as turned down, by a policy or because it is there already."""
        commit = self.commit
        commit._skipped = reason
        self.stage("skipped")
        # A skipped save has no error of its own, so the manager's exit raises nothing.
        commit._seen = True
        error = SaveSkippedError(
            f"nothing was saved: {reason}. Ask 'if commit:' before you await it. Policies and the "
            "backlog are overruled by force=True",
            step=commit.step,
        )
        self._end(error)

    def fail(self, error: BaseException, *, owed: bool) -> None:
        """End the save with `error`; `owed` is True if only the commit delivers it."""
        self.stage("failed")
        self.commit._owed, self.commit._seen = owed, not owed
        self._end(error)

    def _end(self, error: BaseException) -> None:
        self.commit._future.set_exception(error)
        for each in (self.commit._in_root, *self.commit._items.values()):
            if not each.done():
                each._future.set_exception(error)

    @property
    def is_seen(self) -> bool:
        """True if the outcome has been fetched."""
        return self.commit._seen

    def awaited(self) -> AbstractContextManager[None]:
        """Count the body among the calls that wait for the outcome, and will see it."""
        return self.commit._awaited()

    def unseen_error(self) -> BaseException | None:
        """Return the error if nobody has fetched it, or waits for it, and mark it as fetched."""
        return None if self.commit._seen or self.commit._waiting else self.owed_error()

    def owed_error(self) -> BaseException | None:
        """Return the error of a save whose call had returned, and mark it as fetched; else None."""
        commit = self.commit
        if not (commit._owed and commit.done()):
            return None
        commit._seen = True
        return commit._future.exception()


def arrived(commit: Commit) -> None:
    """Mark the step of a commit as arrived in the root."""
    commit._in_root._future.set_result(None)


def stays(commit: Commit, reason: str) -> None:
    """End the arrival of a step that will not be copied to the root, for a reason."""
    error = NotInRootError(f"the step is not in the root: {reason}", step=commit.step)
    commit._in_root._future.set_exception(error)


def step_info(manifest: Manifest, path: str, statistics: SaveStatistics | None = None) -> StepInfo:
    """Return the summary of a committed step at `path`.

    Args:
        manifest: Its manifest.
        path: Path or URL of the step.
        statistics: Times of the save; None for those in the manifest.
    """
    shared = sum(file.size for file in manifest.files.values() if file.shared)
    early: dict[str, Any] = {name: t for name, t in manifest.statistics.items() if name in _EARLY}
    statistics = statistics or SaveStatistics(**early)
    notes = notes_in(manifest) if manifest.extensions else NO_NOTES
    return StepInfo(
        step=manifest.step,
        path=path,
        nbytes=sum(item.nbytes for item in manifest.items.values()),
        items=tuple(manifest.items),
        metrics=flat_metrics(manifest.metrics),
        custom_metadata=manifest.metadata,
        created=StepInfo.time_of(manifest.created_ns),
        committed=StepInfo.time_of(manifest.committed_ns),
        statistics=replace(statistics, shared_bytes=shared),
        parent=manifest.parent,
        nonfinite_leaves=notes.nonfinite_leaves,
        unequal_leaves=notes.unequal_leaves,
        dropped=tuple(manifest.dropped),
    )
