"""The waits of the plain face, in the calling thread; same functions as in `waits`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ckpt._commit import Commit, StepInfo
from ckpt._runtime.futures import outcome, settled_here
from ckpt._runtime.loop import Job
from ckpt.errors import SaveSkippedError

T = TypeVar("T")


def cancelled() -> type[BaseException] | tuple[()]:
    """Return the exceptions that end a wait from outside; to be called in an `except` clause.

    Those are all that are no `Exception`: KeyboardInterrupt, SystemExit, and whatever a program's
    own signal handler raises.
    """
    return () if isinstance(sys.exception(), Exception) else BaseException


def shielded(call: Callable[[], T]) -> T:
    """Return the result of a call; nothing is cancelled here."""
    return call()


def settled_shielded(future: Future[Any]) -> None:
    settled_here(future)


def beside(call: Callable[[], T]) -> T:
    """Return the result of a call that blocks its thread."""
    return call()


def committed(commit: Commit) -> StepInfo:
    """Wait for a commit, and return its result."""
    return commit.result()


def snapshot_taken(job: Job[None], staged: Future[None]) -> None:
    """Wait until the caller of a save may change its arguments; an interrupt stops the save."""
    _stopping(job, lambda: settled_here(staged))
    outcome(staged)


def durable(job: Job[None], commit: Commit) -> StepInfo | None:
    """Wait until a save is durable; None if it was skipped. An interrupt stops the save."""
    try:
        return _stopping(job, commit.result)
    except SaveSkippedError:
        return None


def _stopping(job: Job[None], wait: Callable[[], T]) -> T:
    try:
        return wait()
    except cancelled():
        job.cancel()
        settled_here(job.future)
        raise
