"""The waits of the asyncio face. `plain_waits` has the same functions for the plain one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import anyio

from ckpt._commit import Commit, StepInfo
from ckpt._runtime.futures import outcome, settled
from ckpt._runtime.loop import Job
from ckpt._runtime.threads import run_beside
from ckpt.errors import SaveSkippedError

T = TypeVar("T")


def cancelled() -> type[BaseException]:
    """Return the class of exceptions that end a wait from outside."""
    return anyio.get_cancelled_exc_class()


async def shielded(call: Callable[[], Awaitable[T]]) -> T:
    """Wait for a call even while the caller is cancelled."""
    with anyio.CancelScope(shield=True):
        found = await call()
    return found


async def settled_shielded(future: Future[Any]) -> None:
    """Wait for a future even while the caller is cancelled."""
    with anyio.CancelScope(shield=True):
        await settled(future)


# Waits for a call that blocks its thread.
beside = run_beside


async def committed(commit: Commit) -> StepInfo:
    """Wait for a commit, and return its result."""
    return await commit


async def snapshot_taken(job: Job[None], staged: Future[None]) -> None:
    """Wait until the caller of a save may change its arguments; if cancelled, stop the save."""
    await _stopping(job, settled(staged))
    outcome(staged)


async def durable(job: Job[None], commit: Commit) -> StepInfo | None:
    """Wait until a save is durable; None if it was skipped. If cancelled, stop the save."""
    try:
        return await _stopping(job, committed(commit))
    except SaveSkippedError:
        return None


async def _stopping(job: Job[None], wait: Awaitable[T]) -> T:
    try:
        return await wait
    except cancelled():
        job.cancel()
        await settled_shielded(job.future)
        raise
