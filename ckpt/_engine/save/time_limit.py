"""The time limit of one save: when it has passed, the save is given up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import anyio

from ckpt._commit import CommitHooks
from ckpt._tree.table import format_bytes
from ckpt.errors import DeadlineExceededError


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
