"""Drains: a step is copied to another root whole or not at all, and others wait for theirs.

The drain of one step: it is copied to another root whole, or not at all. A drain is an ordinary
copy: compared with the digests on the way, published in one atomic operation, and never in the
place of another step. A copy that was interrupted leaves its files; if the storage allows it, the
next one compares these files and reuses the whole ones.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection
from typing import Literal

import anyio
from msgspec import Struct

from ckpt._conversion.copies.step_copy import ByteCounter, Pace, StepCopier, at_once
from ckpt._conversion.copies.step_location import StepLocation
from ckpt._conversion.copies.steps import CopyRules, copy_pins, copy_step
from ckpt._format.manifest import Manifest
from ckpt._format.manifest_head import save_id
from ckpt._steps.index import IndexedStep, StepIndex
from ckpt._steps.pins import PinLease, hold
from ckpt.errors import StepNotFoundError, StorageError
from ckpt.step_names import Standard, StepNames
from ckpt.storage._base import Storage

logger = logging.getLogger("ckpt")
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


_LONGEST_PAUSE_SECONDS, _DOUBLINGS = 60.0, 6
# The lease time is short: the leases of a killed process keep others from deleting.
_LEASE_SECONDS, _RENEWALS = 60.0, 6


class DrainBacklog:
    """The steps that wait to be drained, and the one that is being drained. Pure.

    The newest step is worth most: a run would go on from it. After failures, the steps that have
    failed least come next, so that a step that always fails does not block the others.

    Attributes:
        under_way: The step that is being drained, or None.
    """

    def __init__(self, most_waiting: int) -> None:
        self._most = most_waiting
        self._failures: dict[int, int] = {}
        self._tries = 0
        self.under_way: int | None = None

    def __contains__(self, step: int) -> bool:
        return step in self._failures or step == self.under_way

    @property
    def waiting(self) -> list[int]:
        """The steps that wait, the newest first."""
        return sorted(self._failures, reverse=True)

    @property
    def left(self) -> list[int]:
        """The steps that wait or are under way, the newest first."""
        under_way = set() if self.under_way is None else {self.under_way}
        return sorted(self._failures.keys() | under_way, reverse=True)

    @property
    def is_too_long(self) -> bool:
        """True if more steps wait than allowed."""
        return len(self._failures) > self._most

    def add(self, step: int) -> None:
        """Let a step wait, unless it does; a step under way is drained once more afterwards."""
        self._failures.setdefault(step, 0)

    @property
    def order(self) -> list[int]:
        """The steps that wait, in the order in which they are drained."""
        return sorted(self._failures, key=lambda step: (self._failures[step], -step))

    def begin(self, step: int) -> None:
        """Take a waiting step for a drain."""
        self._tries = self._failures.pop(step)
        self.under_way = step

    def fail(self) -> None:
        """Let the step under way wait again, behind steps that failed less."""
        self._tries += 1
        self.put_back()

    def put_back(self) -> None:
        """Let the step under way wait again, if there is one, without counting a failure."""
        if self.under_way is not None:
            self._failures[self.under_way] = self._tries
        self.under_way = None

    def end(self) -> None:
        """Forget the step under way; steps that failed before may succeed now."""
        self.under_way = None
        self._failures = dict.fromkeys(self._failures, 0)

    def give_up(self, pinned: Collection[int]) -> int | None:
        """Forget the oldest step that is not pinned or under way, and return it.

        None if not too many steps wait, or if there is no such step.
        """
        free = self._failures.keys() - {*pinned, self.under_way}
        if not self.is_too_long or not free:
            return None
        oldest = min(free)
        del self._failures[oldest]
        return oldest


def pause_after(failures: int) -> float:
    """Return the seconds to wait after so many failures in a row, from 1 to 60."""
    return min(_LONGEST_PAUSE_SECONDS, 2.0 ** min(failures - 1, _DOUBLINGS))


class _LeasedStep(Struct):
    """A step that is held; it has no lease while its root refuses one."""

    step_dir: str
    lease: PinLease | None = None


class DrainLeases:
    """Pin leases on steps of one root."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._seconds = min(_LEASE_SECONDS, storage.traits.lease_seconds)
        self._leased: dict[int, _LeasedStep] = {}

    async def take(self, step: int, step_dir: str) -> bool:
        """Hold a step until it is dropped; return False if the step is not there.

        A root that refuses is asked again at the next renewal.
        """
        if step in self._leased:
            return True
        leased = self._leased[step] = _LeasedStep(step_dir)
        is_there = False
        try:
            is_there = await self._lease(step, leased)
        finally:
            if not is_there:
                self._leased.pop(step, None)
        return is_there

    async def drop(self, step: int) -> None:
        leased = self._leased.pop(step, None)
        if leased is not None and leased.lease is not None:
            await leased.lease.drop()

    async def drop_all(self) -> None:
        """Release all steps, even when cancelled."""
        with anyio.CancelScope(shield=True):
            for step in list(self._leased):
                await self.drop(step)

    async def renew(self) -> None:
        """Renew all leases until cancelled."""
        while True:
            await anyio.sleep(self._seconds / _RENEWALS)
            for step, leased in list(self._leased.items()):
                try:
                    if leased.lease is None or not await leased.lease.renew():
                        await self._lease(step, leased)
                except StorageError as error:
                    logger.debug("the hold on step %d was not renewed: %s", step, error)

    async def _lease(self, step: int, leased: _LeasedStep) -> bool:
        """Put a lease on a step; return False if the step is not there."""

        async def look() -> bool | None:
            return await self._storage.exists(leased.step_dir) or None

        try:
            found = await hold(self._storage, step, look, seconds=self._seconds)
        except StorageError as error:
            logger.debug("step %d is not held in %s: %s", step, self._storage.location, error)
            return True
        leased.lease = None if found is None else found[0]
        if leased.lease is not None and self._leased.get(step) is not leased:
            # The step was dropped meanwhile.
            await leased.lease.drop()
        return found is not None
