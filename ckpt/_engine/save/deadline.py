"""The deadline of one save: when it has passed, the save is given up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import anyio

from ckpt._commit import CommitHooks
from ckpt._tree.table import size_text
from ckpt.errors import DeadlineExceededError


@contextlib.contextmanager
def given_up_after(seconds: float | None, hooks: CommitHooks) -> Iterator[None]:
    """Cancel the body once so many seconds have passed since the call of the save.

    Args:
        seconds: How many; None never does.
        hooks: The commit of the save.

    Raises:
        DeadlineExceededError: It was cancelled; says in which stage.
    """
    if seconds is None:
        yield
        return
    with anyio.move_on_after(max(0.0, seconds - hooks.watch.elapsed)) as scope:
        yield
    if scope.cancelled_caught:
        raise _exceeded(seconds, hooks)


def _exceeded(seconds: float, hooks: CommitHooks) -> DeadlineExceededError:
    stage, progress = hooks.now
    done = ""
    if stage in ("staging", "writing") and progress.total:
        moved = progress.staged if stage == "staging" else progress.written
        done = f", {size_text(moved)} of {size_text(progress.total)}"
    left = "nothing of it is left"
    if stage == "publishing":
        left = "it may have become a step all the same: look with all_steps()"
    return DeadlineExceededError(
        f"the save was given up {seconds:g} s after its call (deadline={seconds:g}), while it was "
        f"{stage}{done}; {left}"
    )
