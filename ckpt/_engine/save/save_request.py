"""Save requests: the data that a save is asked to write, and its limits of time."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import anyio
from msgspec import Struct, field

from ckpt._commit import CommitHooks
from ckpt._format.manifest import JsonValue
from ckpt._format.manifest_head import DroppedItem, Parent, ReplacedSave
from ckpt._settings import IfExists
from ckpt._tree.table import format_bytes
from ckpt.errors import DeadlineExceededError, StepExistsError, StorageError
from ckpt.storage._base import Attempt, Storage

logger = logging.getLogger("ckpt")


class SaveRequest(Struct, frozen=True):
    """The data of a save, and its name.

    Attributes:
        step_dir: Name of the step directory that it becomes.
        step: The step, or None for a one-shot checkpoint.
        items: The objects by item name. Emptied when staging begins: the caller's arrays must not
            be kept alive while they are written.
        unnamed: True if the caller gave one object without a name.
        metrics: User metrics.
        metadata: User metadata.
        if_exists: Action if the step directory exists already.
        timeout: Seconds after its call at which the save is given up; None for never.
        parent: The checkpoint that the run began from, or None.
        replaces: As in `Manifest`.
        left_behind: As in `Manifest`.
        times_ns: For the copy of another step, the start of its save and its commit, in Unix
            nanoseconds; None for the times of this save.
        dropped: Items that the other step has lost.
    """

    step_dir: str
    step: int | None
    items: dict[str, Any]
    unnamed: bool
    metrics: Mapping[str, Any] | None
    metadata: JsonValue
    if_exists: IfExists
    timeout: float | None = None
    parent: Parent | None = None
    replaces: Sequence[ReplacedSave] = ()
    left_behind: Sequence[int] = ()
    times_ns: tuple[int, int] | None = None
    dropped: Sequence[DroppedItem] = ()

    @property
    def replaces_any(self) -> bool:
        """True if an existing step directory is replaced, whatever its content."""
        return self.if_exists == "replace"


def step_exists(what: str, step: int | None) -> StepExistsError:
    """Return the error of a save whose name is taken; `what` names the object that has it."""
    other = "path" if step is None else "step"
    return StepExistsError(
        f"{what}. Choose another {other}, or pass if_exists='replace' to replace it", step=step
    )


class SaveCall(Struct, eq=False):
    """The data of one call, and its progress; an ordinary save is a single call.

    Attributes:
        items: The objects by item name. Emptied when staging begins.
        unnamed: True if the caller gave one object without a name.
        on_snapshot: Called once the caller may change or donate everything it passed.
        on_staged: Called once no more staging memory is needed.
        began: Time of the call, by `time.perf_counter`.
        caller_released: Set when the caller no longer waits for the call.
        urgent: Set when a task waits for memory, or for an item to be durable: work for the cores
            is no longer postponed.
        stagings: Number of unfinished stagings: the handlers' calls count as one, each staging that
            goes on after they have returned as another.
    """

    items: dict[str, Any]
    unnamed: bool
    on_snapshot: Callable[[], None] = lambda: None
    on_staged: Callable[[], None] = lambda: None
    began: float = field(default_factory=time.perf_counter)
    caller_released: anyio.Event = field(default_factory=anyio.Event)
    urgent: anyio.Event = field(default_factory=anyio.Event)
    stagings: int = 1


class SaveCalls:
    """The calls of one save, in their order. Used on the engine's loop."""

    def __init__(self, *only: SaveCall) -> None:
        """Take the only call of an ordinary save; or without one, those that come until `finish`.

        An item may arrive in several parts then, one in each call.
        """
        self.in_parts = not only
        self._queue: deque[SaveCall] = deque(only)
        self._changed = anyio.Event()
        self._finished = bool(only)

    def add(self, call: SaveCall) -> None:
        self._queue.append(call)
        self._changed.set()

    def finish(self) -> None:
        """Declare that there are no more calls."""
        self._finished = True
        self._changed.set()

    def drop(self) -> None:
        """Drop the calls that will not be saved, and with them the callers' objects."""
        self._queue.clear()

    async def next(self) -> SaveCall | None:
        """Return the next call, waiting until there is one; None after the last."""
        while not self._queue:
            if self._finished:
                return None
            self._changed = anyio.Event()
            await self._changed.wait()
        return self._queue.popleft()


@contextlib.contextmanager
def time_limit(seconds: float | None, hooks: CommitHooks) -> Iterator[None]:
    """Cancel the body when `seconds` have passed since the call of the save.

    Args:
        seconds: The limit; None for no limit.
        hooks: Hooks of the save's commit, with its start time.

    Raises:
        DeadlineExceededError: The body was cancelled; names the stage.
    """
    left = None if seconds is None else max(0.0, seconds - hooks.watch.elapsed)
    with anyio.move_on_after(left) as scope:
        yield
    if seconds is not None and scope.cancelled_caught:
        raise _exceeded(seconds, hooks)


def _exceeded(seconds: float, hooks: CommitHooks) -> DeadlineExceededError:
    stage, progress = hooks.commit.stage, hooks.commit.progress
    done = ""
    if stage in ("staging", "writing") and progress.total:
        moved = progress.staged if stage == "staging" else progress.written
        done = f", {format_bytes(moved)} of {format_bytes(progress.total)}"
    left = "nothing of it is left"
    if stage == "publishing":
        left = "it may have become a step all the same: look with all_steps()"
    return DeadlineExceededError(
        f"the save was given up {seconds:g} s after its call (timeout={seconds:g}), while it was "
        f"{stage}{done}; {left}"
    )


# Renewals within the time of one lease: some may fail or come late.
_RENEWALS = 6


async def renew_lease(storage: Storage, attempt: Attempt, renewal: anyio.CancelScope) -> None:
    """Renew the lease of an attempt until `renewal` is cancelled."""
    with renewal:
        while True:
            await anyio.sleep(storage.traits.lease_seconds / _RENEWALS)
            # Failures are only logged: publishing decides if the attempt is still ours.
            try:
                await storage.renew(attempt)
            except StorageError as error:
                logger.warning("the lease of an attempt was not renewed: %s", error)
