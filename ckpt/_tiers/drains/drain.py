"""The drain of one step: copied to another root whole, or not at all.

It is an ordinary copy: compared with its digests on the way, published in one atomic operation, and
never in the place of another step. A copy that was cut leaves its files; the next one compares them
and takes over those that are whole, where a storage can do that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection
from typing import Literal

from msgspec import Struct

from ckpt._conversion.copies.place import CopyPlace
from ckpt._conversion.copies.step_copy import Pace, StepCopier, at_once
from ckpt._conversion.copies.steps import CopyRules, copy_pins, copy_step
from ckpt._events import Event
from ckpt._steps.index import IndexedStep, StepIndex
from ckpt.errors import StepNotFoundError
from ckpt.step_names import Standard, StepNames
from ckpt.storage._base import Storage

_PLAIN = Standard()

Outcome = Literal["copied", "there", "damaged", "deleted", "blocked", "given up"]


class Drained(Struct, frozen=True):
    """What has become of a step that was to be drained.

    Attributes:
        step: The step.
        outcome: `copied`; `there`, if it was; `damaged` or `deleted`, if it was not copied because
            of that; `blocked`, if another step has its name in the target; `given up`, if too many
            newer ones were waiting.
        nbytes: Bytes that were copied; without those that an earlier drain had copied.
        seconds: How long that took.
        reason: Why it was not copied, or None.
    """

    step: int
    outcome: Outcome
    nbytes: int = 0
    seconds: float = 0.0
    reason: str | None = None

    @property
    def is_safe(self) -> bool:
        """Whether the target has it."""
        return self.outcome in ("copied", "there")


class MovedBytes:
    """Counts the bytes of a copy.

    Attributes:
        nbytes: Those that were copied.
    """

    def __init__(self) -> None:
        self.nbytes = 0

    def expect(self, nbytes: int) -> None:
        """Do nothing."""

    def move(self, nbytes: int) -> None:
        """Count bytes that were copied."""
        self.nbytes += nbytes

    def __call__(self, event: Event) -> None:
        """Do nothing."""


async def drain_step(
    step: int, source: CopyPlace, target: CopyPlace, pace: Pace = at_once
) -> Drained:
    """Copy a committed step with its pins, unless it is there.

    Args:
        step: The step.
        source: Where it is.
        target: Where it goes, in a root that was prepared. A sweep of it, afterwards, removes what
            drains that were cut have left there.
        pace: Asked before each piece is moved.

    Raises:
        InvalidArgumentError: It would be copied to itself.
        StorageError: A storage refused.

    Cancellation: nothing can be seen of it, unless it was just being published: then it is whole.
    """
    began = time.perf_counter()
    moved = MovedBytes()
    copier = StepCopier(moved, pace=pace, goes_on=True)
    try:
        copied = await copy_step(copier, source, step, target, CopyRules(makes_way=True), moved)
    finally:
        copier.close()
    if copied.outcome in ("copied", "there"):
        # The retention of the target may have deleted it already.
        with contextlib.suppress(StepNotFoundError):
            await copy_pins(source.storage, step, target)
    seconds = max(time.perf_counter() - began, 0.0)
    assert copied.outcome != "unselected"
    return Drained(step, copied.outcome, moved.nbytes, seconds, copied.reason)


async def missing(
    source: Storage,
    target: Storage,
    wanted: Collection[int] | None = None,
    names: StepNames = _PLAIN,
) -> list[int]:
    """Return the steps of a root that another one does not have, the newest first.

    A step that was saved anew is missing, too, where the target has the old one.

    Args:
        source: The root.
        target: The other one, which need not exist.
        wanted: The steps that are to be there; None for all.
        names: How the directories of steps are named in both.

    Raises:
        StorageError: A storage refused.
    """
    has = await StepIndex(source, names, missing="awaited").refresh()
    there = await StepIndex(target, names, missing="awaited").refresh()
    return sorted(
        (
            step
            for step, found in has.items()
            if not found.is_foreign
            and (wanted is None or step in wanted)
            and (step not in there or _identity(there[step]) != _identity(found))
        ),
        reverse=True,
    )


def _identity(step: IndexedStep) -> tuple[int, int, str]:
    """Return what a copy of a step has in common with it, and no other step."""
    return step.created_ns, step.committed_ns, step.save
