"""The drain of one step: it is copied to another root whole, or not at all.

A drain is an ordinary copy: compared with the digests on the way, published in one atomic
operation, and never in the place of another step. A copy that was interrupted leaves its files; if
the storage allows it, the next one compares these files and reuses the whole ones.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection
from typing import Literal

from msgspec import Struct

from ckpt._conversion.copies.step_copy import ByteCounter, Pace, StepCopier, at_once
from ckpt._conversion.copies.step_location import StepLocation
from ckpt._conversion.copies.steps import CopyRules, copy_pins, copy_step
from ckpt._format.manifest import Manifest
from ckpt._format.manifest_head import save_id
from ckpt._steps.index import IndexedStep, StepIndex
from ckpt.errors import StepNotFoundError
from ckpt.step_names import Standard, StepNames
from ckpt.storage._base import Storage

_PLAIN = Standard()

Outcome = Literal["copied", "there", "damaged", "deleted", "blocked", "given up", "refused"]


class DrainResult(Struct, frozen=True, tag="ended", omit_defaults=True):
    """The outcome of a drain; also that of one part of a step, and a message or a note about it.

    Attributes:
        step: The step.
        outcome: `copied`; `there` if the target had it; `damaged` or `deleted` if it could not be
            copied for that reason; `blocked` if another step has its name in the target; `given
            up` if too many newer steps were waiting; `refused` if a storage refused, and
            the step does not wait.
        nbytes: Copied bytes, without those that an earlier drain had copied.
        seconds: Duration of the copy.
        reason: Reason why it was not copied, or None.
        save: `save_id` of what was to be copied: the step may have been saved anew since.
            Empty if it is unknown.
    """

    step: int
    outcome: Outcome
    nbytes: int = 0
    seconds: float = 0.0
    reason: str | None = None
    save: str = ""

    @property
    def is_safe(self) -> bool:
        """True if the target has the step."""
        return self.outcome in ("copied", "there")

    @property
    def problem(self) -> str:
        """Reason why the target does not have the step; empty if it does."""
        return "" if self.is_safe else self.reason or self.outcome


async def drain_step(
    step: int, source: StepLocation, target: StepLocation, pace: Pace = at_once
) -> DrainResult:
    """Copy a committed step with its pins, unless the target has it.

    Args:
        step: The step.
        source: Location of the step.
        target: Location of the copy, in a root that was prepared. A later sweep of this root
            removes leftovers of interrupted drains.
        pace: Awaited before each piece is moved.

    Raises:
        InvalidArgumentError: The source and the target are the same.
        StorageError: A storage refused.

    Cancellation: nothing of the copy is visible, unless it was just being published: then it is
    whole.
    """
    began = time.perf_counter()
    moved = ByteCounter()
    rules, save = CopyRules(replaces_older=True), ""

    def on_read(manifest: Manifest) -> None:
        nonlocal save
        save = save_id(manifest.save, manifest.created_ns)

    with contextlib.closing(StepCopier(moved, pace=pace, goes_on=True)) as copier:
        copied = await copy_step(copier, source, step, target, rules, on_read)
    if copied.outcome in ("copied", "there"):
        # The retention of the target may have deleted the copy already.
        with contextlib.suppress(StepNotFoundError):
            await copy_pins(source.storage, step, target)
    seconds = max(time.perf_counter() - began, 0.0)
    assert copied.outcome != "unselected"
    return DrainResult(step, copied.outcome, moved.nbytes, seconds, copied.reason, save)


async def missing(
    source: Storage,
    target: Storage,
    wanted: Collection[int] | None = None,
    names: StepNames = _PLAIN,
) -> list[int]:
    """Return the steps of a root that another root does not have, the newest first.

    A step that was saved anew is missing, too, if the target has the old one.

    Args:
        source: The root.
        target: The other root, which need not exist.
        wanted: The steps to look for; None for all.
        names: Naming of the step directories in both.

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
    """Return a key that a step shares with its copies, and with no other step."""
    return step.created_ns, step.committed_ns, step.save
