"""Reads after saves: a restore first waits for the saves of its own manager."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, SupportsIndex

import anyio

from ckpt._arguments import check_step
from ckpt._runtime.futures import settled
from ckpt._steps.step_choice import RunStart
from ckpt.errors import CommitTimeoutError, InvalidArgumentError, StepNotFoundError
from ckpt.keep._questions import Requirement

if TYPE_CHECKING:
    from ckpt._steps.service import RootService


async def restore(service: RootService, step: SupportsIndex | None, *given: Any) -> Any:
    """Restore as `StepReader.restore` does, after the saves under way of `step`, or after all."""
    number = None if step is None else check_step(step)
    async with _after_saves(service, number):
        return await service.reader.restore(number, *given)


async def start_of_run(service: RootService, wanted: Requirement | None) -> RunStart:
    """Return the step from which the run begins or goes on, after all saves under way."""
    async with _after_saves(service, None):
        return await service.reader.start_of_run(wanted)


@contextlib.asynccontextmanager
async def _after_saves(service: RootService, step: int | None) -> AsyncIterator[None]:
    """Wait for the save of `step`, or for all, and run the body, which reads.

    Raises:
        InvalidArgumentError: The step is being saved in parts, and was not finalized yet.
        CommitTimeoutError: A save had not ended within the time limit.
        StepNotFoundError: The body raises it; its cause is the error of a save that failed.
    """
    saves = service.saves
    commits = [
        commit
        for commit in saves.commits.under_way()
        if step in (None, commit.step) and commit.step not in saves.in_parts
    ]
    is_in_parts = step in saves.in_parts
    if step is not None and (commits or is_in_parts) and step in await service.reader.all_steps():
        # A save replaces the step: until its commit the old step is there and can be read.
        commits, is_in_parts = [], False
    if is_in_parts:
        raise InvalidArgumentError(
            "this step is being saved in parts, and is not there before the block of partial() "
            "ends: restore it afterwards",
            step=step,
        )
    with anyio.move_on_after(saves.restore_seconds):
        for commit in commits:
            await settled(commit._future)
    for commit in commits:
        if not commit.done():
            raise CommitTimeoutError(
                f"a restore has waited {saves.restore_seconds:g} s for its save, which is "
                f"{commit.stage} ({commit.progress.fraction:.0%} written). Wait for the commit, or "
                "pass Timeouts(restore=...)",
                step=commit.step,
            )
    failed = [commit._future.exception() for commit in commits]
    cause = next((error for error in reversed(failed) if error is not None), None)
    try:
        yield
    except StepNotFoundError as error:
        if cause is None:
            raise
        error.message = f"{error.message}; its save has failed: {cause}"
        raise error from cause
