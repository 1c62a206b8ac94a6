"""The processes of a job of several: what they do at one root. `solo_job` has a table of them."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import NoReturn, TypeVar

import anyio
from msgspec.structs import asdict, astuple

from ckpt._arguments import check_step, invalid
from ckpt._engine.restore.step_files import Elsewhere
from ckpt._events import Observer
from ckpt._format.manifest import JsonValue, decode, encode
from ckpt._job.agreement.failures import beating
from ckpt._job.agreement.operation import Operation, gathered
from ckpt._job.agreement.peers import Peers
from ckpt._job.all_disks import CommonSteps, common_steps, join_notes, notes_data
from ckpt._job.multihost_save import MultihostSave
from ckpt._job.shared_reads import Broadcast
from ckpt._job.solo import Act, Do, FoundStep, Judge, Reasons, See, judgements, restore_from_trash
from ckpt._redaction import redact
from ckpt._runtime.futures import CallingThread
from ckpt._runtime.loop import EngineLoop
from ckpt._runtime.threads import run_in_thread
from ckpt._settings import BacklogPolicy
from ckpt._steps.index import IndexedStep, StepIndex
from ckpt._steps.opened import OpenedStep, shortened
from ckpt._steps.removal.deletion_plan import DeletionPlan, StepTrash, common_deletions, kept_items
from ckpt._steps.removal.retention import Retention
from ckpt._steps.restore_options import check_broadcast
from ckpt.errors import (
    CheckpointError,
    CoordinationError,
    InvalidArgumentError,
    StepDeletedError,
    StepNotFoundError,
)
from ckpt.keep._questions import SavedStep

logger = logging.getLogger("ckpt")

T = TypeVar("T")

# The most bytes of a manifest that the primary sends to all other processes, in sum. The service of
# the job sends a MiB in 25 ms (docs/design/005): a large manifest is read faster from the storage,
# which serves all processes at once.
_MOST_HANDED_BYTES = 16 << 20


class MultihostJob:
    """The job of several processes.

    Attributes:
        peers: The processes.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    def at(self, index: StepIndex, backlog: BacklogPolicy) -> SharedRoot | SeparateRoots:
        """Return the processes at the root of `index`.

        Raises:
            InvalidArgumentError: Saves would be superseded, in each process another one.
        """
        if backlog == "supersede":
            what = f"'wait' or 'skip', since the {self.peers.count} processes of this job might"
            what += " differ in which save they give up"
            raise invalid("backlog", backlog, what, of="Staging")
        return (SeparateRoots if self.peers.own_disks else SharedRoot)(self.peers, index)

    def one_shot(self, step_dir: str) -> MultihostSave:
        """Return the part that this process takes in a save without a manager.

        Raises:
            InvalidArgumentError: Every process has a disk of its own.
        """
        if self.peers.own_disks:
            raise InvalidArgumentError(
                "processes with disks of their own (OwnDisks) can only save with a manager, which "
                "keeps track of all disks: use CheckpointManager(coordinator=...)"
            )
        return MultihostSave(self.peers, f"save-{step_dir}", f"the save of {step_dir}")


class _SeveralProcesses:
    """The methods that are the same with one shared root and with a root for each process."""

    def __init__(self, peers: Peers, index: StepIndex) -> None:
        self.peers = peers
        self.process: int = peers.index
        self.count: int = peers.count
        # Bytes read count as a heartbeat.
        self.observers: tuple[Observer, ...] = (lambda event: peers.advance(event.nbytes),)
        self._index = index
        # Set on the engine's loop.
        self._order: anyio.Lock | None = None

    async def on_primary(self, kind: str, step: int, what: str, act: Act) -> JsonValue:
        """Return the result of `act` on the primary; see `Peers.on_primary`."""
        return await self.peers.on_primary(f"{kind}-{step}", what, act)

    async def open(self, act: Do) -> None:
        """Call `act` in every process, which opens the root; if one fails, all do."""
        try:
            await act()
        except BaseException as error:
            # Otherwise the other processes would wait for this one.
            await self.peers.cannot_open(error)
            raise

    def save(self, kind: str, what: str) -> MultihostSave:
        """Return the part that this process takes in a save; the save takes its turn now."""
        self._order = self._order or anyio.Lock()
        return MultihostSave(self.peers, kind, what, self._order)

    def save_in_parts(self, step: int) -> NoReturn:
        """Refuse the save of a step over several calls.

        Raises:
            InvalidArgumentError: Always.
        """
        raise InvalidArgumentError(
            "a save in parts is made by one process, and this job has "
            f"{self.count}: save the whole step with save()",
            step=step,
        )

    def found_here(self, found: list[T]) -> list[T]:
        """Return none: the processes must not act on what only one of them has seen."""
        return []

    def withdraw(self, loop: EngineLoop, kind: str, what: str, error: Exception) -> None:
        """Tell the processes that may wait for a save that it cannot begin here; does not wait."""
        # If the manager is closed, its closing has told them.
        with contextlib.suppress(CheckpointError):
            loop.submit(self.peers.withdraw, kind, what, error)

    def _check_same(self, step: int | None, other: int | None) -> None:
        """Raise if this process restores another step than another process."""
        if step != other and step is not None:
            raise CoordinationError(
                f"process {self.process} restores step {step} while another one restores step "
                f"{other}. All processes must restore the same step; restore() without a step "
                "takes the latest on all of them"
            )


class SharedRoot(_SeveralProcesses):
    """Several processes that see the same root; the primary acts for all of them."""

    def __init__(self, peers: Peers, index: StepIndex) -> None:
        super().__init__(peers, index)
        self.steps = index

    async def begin(self, act: Do) -> None:
        """Call `act` on the primary, without the others."""
        if self.process == 0:
            await act()

    tidy = begin

    async def decided(self, kind: str, what: str, act: Act) -> JsonValue:
        """Return the decision of `act` on the primary, which sends it to all."""
        return await self.peers.on_primary(kind, what, act)

    async def judged(self, see: See, judge: Judge) -> Reasons:
        """Return the reasons of `judge` against the steps that `see` reads, equal on all."""
        return judgements(await see(await self._index.refresh()), judge)

    @contextlib.asynccontextmanager
    async def restoring(
        self,
        step: int | None,
        opened: OpenedStep | None,
        broadcast_bytes: int | None,
        caller: CallingThread,
        elsewhere: Elsewhere | None,
    ) -> AsyncIterator[FoundStep]:
        """Agree on the step that the primary finds; the body succeeds on all processes or none.

        `opened` is the step if the primary has found it already. Copies in other places are not
        read: each process may have a different part of the step.
        """
        async with self.peers.all_of("restore", _restore_of(step)) as operation:
            check_broadcast(broadcast_bytes)
            try:
                found = await self._find_with_primary(step, opened, broadcast_bytes, operation)
                broadcast = None
                if broadcast_bytes is not None:
                    broadcast = Broadcast(self.peers, operation, broadcast_bytes, caller)
                yield FoundStep(found, broadcast=broadcast)
            except StepDeletedError as error:
                if self.process == 0:
                    raise
                # The primary has found it.
                why = f"or process {self.process} sees another root than process 0"
                raise StepDeletedError(f"{error.message}; {why}", step=error.step) from error

    async def _find_with_primary(
        self, step: int | None, opened: OpenedStep | None, nbytes: int | None, operation: Operation
    ) -> OpenedStep:
        """Return the step that the primary finds; the primary sends its manifest to the others."""
        if self.process == 0:
            opened = opened or await self._index.found(step)
            manifest = opened.manifest
            about = {"step": manifest.step, "attempt": manifest.attempt, "broadcast": nbytes}
            handed = b""
            if opened.foreign is None:
                about["step_dir"] = opened.step_dir
                handed = await run_in_thread(encode, manifest)
            if len(handed) * (self.count - 1) > _MOST_HANDED_BYTES:
                handed = b""
            await operation.lead(json.dumps(about).encode() + b"\n" + handed)
            return opened
        first, _, handed = (await operation.lead(None)).partition(b"\n")
        about = json.loads(first)
        self._check_same(step, about["step"])
        if about["broadcast"] != nbytes:
            raise CoordinationError(
                f"process {self.process} restores with broadcast_bytes={nbytes} while process "
                f"0 does with {about['broadcast']}; give all processes the same",
                step=about["step"],
            )
        if handed:
            where = f"{self._index.location}/{about['step_dir']}, from process 0"
            manifest = await run_in_thread(partial(decode, handed, where=where))
            return OpenedStep(self._index.storage, about["step_dir"], manifest)
        try:
            opened = await self._index.found(about["step"])
        except StepNotFoundError as error:
            # The primary found the step a moment ago.
            where = self._index.location
            raise StepDeletedError(
                f"{where}: it was deleted while it was read", step=about["step"]
            ) from error
        if opened.manifest.attempt != about["attempt"]:
            raise StepDeletedError(
                f"{self._index.location}/{opened.step_dir} was replaced while it was read",
                step=opened.manifest.step,
            )
        return opened

    async def on_step(self, kind: str, step: int, what: str, act: Act) -> JsonValue:
        """Do the same as `on_primary`: all processes see the same steps."""
        return await self.on_primary(kind, step, what, act)

    async def everywhere(self, kind: str, step: int, what: str, act: Act) -> JsonValue:
        """Do the same as `on_primary`: all processes see the same root."""
        return await self.on_primary(kind, step, what, act)

    async def delete(self, kind: str, step: int, what: str, act: Act, idle: Do) -> JsonValue:
        """Return the result of `act` on the primary, which deletes for all.

        The others wait by `idle` first, which the primary does in `act`.
        """
        if self.process != 0:
            await idle()
        return await self.on_primary(kind, step, what, act)

    async def undelete(self, step: int, trash: StepTrash) -> None:

        async def act() -> None:
            await restore_from_trash(step, trash)

        await self.on_primary("undelete", step, f"undeleting step {step}", act)

    async def deletion_plan(self, saved: int, retention: Retention) -> None:
        """Return None: the retention makes the plan itself."""


class SeparateRoots(_SeveralProcesses):
    """Several processes with a root each. A step counts if all of them have it."""

    def __init__(self, peers: Peers, index: StepIndex) -> None:
        super().__init__(peers, index)
        self._said_foreign = False

    @property
    def steps(self) -> SeparateRoots:
        """Itself: `refresh`, `latest` and `found` see the steps that all processes have."""
        return self

    async def begin(self, act: Do) -> None:
        """Call `act`: each process writes the notes of its own root."""
        await act()

    async def tidy(self, act: Do) -> None:
        """Do nothing: what goes is decided by all, after a save."""

    async def left_behind(self) -> dict[int, IndexedStep]:
        """Return none: the disks may differ about them, so all steps count by their numbers."""
        return {}

    async def refresh(self) -> dict[int, IndexedStep]:
        """Return the steps that all processes have, ascending."""
        look = partial(self._in_common, None)
        return (await self.peers.all_or_none("steps", "listing the steps", look)).everywhere

    async def decided(self, kind: str, what: str, act: Act) -> JsonValue:
        """Return the decision of `act`, the same on each: it depends on common steps only."""
        return await act()

    async def judged(self, see: See, judge: Judge) -> Reasons:
        """Return the reasons against the steps that all processes have; any disk may give one.

        `see` reads the steps on this disk; `judge` also gets leaves that are odd on other disks.
        """
        async with self.peers.all_of("judge", "which steps may be taken") as operation:
            common = await self._in_common(None, operation)
            own = judgements(await self._seen(see, common, operation), judge)
            every = await gathered(operation, list(own.values()), "judged")
        return {
            step: next(filter(None, reasons), "")
            for step, reasons in zip(own, zip(*every, strict=True), strict=True)
        }

    async def latest(self) -> IndexedStep | None:
        """Return the greatest step that all processes have, or None."""
        return next(reversed((await self.refresh()).values()), None)

    async def found(self, step: int | None) -> OpenedStep:
        """Open `step`, or the latest one that all processes have."""
        if step is None:
            latest = await self.open_latest()
            if latest is None:
                raise self._index.no_step()
            return latest
        return await self._index.found(step)

    async def open_latest(self) -> OpenedStep | None:
        """Open the greatest step that all processes have; None if there is none."""
        latest = await self.latest()
        return None if latest is None else await self._index.found(latest.step)

    @contextlib.asynccontextmanager
    async def restoring(
        self,
        step: int | None,
        opened: OpenedStep | None,
        broadcast_bytes: int | None,
        caller: CallingThread,
        elsewhere: Elsewhere | None,
    ) -> AsyncIterator[FoundStep]:
        """Find a step that all processes have; the body succeeds on all of them or none.

        They look again even if a step is `opened`: each process reads its own disk.
        """
        async with self.peers.all_of("restore", _restore_of(step)) as operation:
            check_broadcast(broadcast_bytes)
            if broadcast_bytes is not None:
                raise InvalidArgumentError(
                    "broadcast_bytes: with OwnDisks every process reads from its own disk, so that "
                    "there is nothing to share; leave it out"
                )
            yield FoundStep(await self._index.found(await self._common(step, operation)))

    async def on_step(self, kind: str, step: int, what: str, act: Act) -> JsonValue:
        """Call `act` for a step on every disk.

        Raises:
            StepNotFoundError: Not all processes have the step; `act` was called nowhere.
        """
        async with self.peers.all_of(f"{kind}-{step}", what) as operation:
            await self._common(step, operation)
            return await act()

    async def everywhere(self, kind: str, step: int, what: str, act: Act) -> JsonValue:
        """Call `act` for the root of every process; all succeed or none."""
        return await self.peers.all_or_none(f"{kind}-{step}", what, lambda _: act())

    async def delete(self, kind: str, step: int, what: str, act: Act, idle: Do) -> JsonValue:
        """Delete a step from all disks that have it.

        Raises:
            StepNotFoundError: No disk has it.
        """
        async with self.peers.all_of(f"{kind}-{step}", what) as operation:
            missing = None
            try:
                async with beating(operation):
                    await act()
            except StepNotFoundError as error:
                missing = error
            deleted = await gathered(operation, missing is None, "deleted")
            if missing is not None and not any(deleted):
                raise missing
        return None

    async def undelete(self, step: int, trash: StepTrash) -> None:
        """Take a step back from the trash of every disk.

        Raises:
            StepNotFoundError: No save of the step is in every trash; nothing was done.
            StepExistsError: The step exists on one of the disks; nothing was done.
        """
        async with self.peers.all_of(f"undelete-{step}", f"undeleting step {step}") as operation:
            own: JsonValue = list(await trash.saves_of(step))
            every = await gathered(operation, own, "trashed")
            common = [save for save in every[0] if all(save in each for each in every)]
            if not common:
                raise await trash.missing(step)
            await trash.undelete(step, common[-1])

    async def deletion_plan(self, saved: int, retention: Retention) -> DeletionPlan | None:
        """Return what is to be deleted from this disk after `saved`.

        Policies get the steps that all processes have; a step goes only if no process keeps it.
        """
        if retention.keeps_all:
            return None
        async with self.peers.all_of(
            f"preserve-{saved}", f"what to delete after step {saved}"
        ) as operation:
            common = await self._in_common(None, operation)
            steps = await self._seen(retention.saved_steps, common, operation)
            own = await retention.deletion_plan(common.own, steps)
            kept: JsonValue = kept_items(common.own, own)
            return common_deletions(own, await gathered(operation, kept, "kept"))

    async def _seen(self, see: See, common: CommonSteps, operation: Operation) -> list[SavedStep]:
        """Return steps in the form that policies take, the same on all processes."""
        async with beating(operation):
            own = await see(common.own)
        everywhere = common.everywhere.values()
        if not any(each.notes for each in everywhere):
            # No disk has odd leaves. The disks may differ only in whether that is known.
            return [
                replace(step, **asdict(each.notes))
                for step, each in zip(own, everywhere, strict=True)
            ]
        told = await run_in_thread(notes_data, own)
        return join_notes(own, await gathered(operation, told, "leaves"))

    async def _in_common(self, asked: int | None, operation: Operation) -> CommonSteps:
        """Return the steps that all processes have.

        Args:
            asked: The step that all processes ask for, or None.
            operation: The operation to which this look belongs.
        """
        async with beating(operation):
            found = await self._index.refresh()
        # A step counts only if all processes have published it, with parts of the same save.
        self._say_foreign([each.step for each in found.values() if each.is_foreign])
        own = [[each.step, each.save, list(astuple(each.notes))] for each in found.values()]
        every = await gathered(operation, [asked, own], "steps")
        for other, _ in every:
            self._check_same(asked, other)
        return common_steps(found, [steps for _, steps in every])

    def _say_foreign(self, steps: list[int]) -> None:
        """Warn once that Orbax steps are left out: it is unknown which of them belong together."""
        if steps and not self._said_foreign:
            self._said_foreign = True
            logger.warning(
                "%s: steps that another library wrote are left out, since every process has its "
                "own disk: %s",
                redact(self._index.location),
                shortened(steps),
            )

    async def _common(self, step: int | None, operation: Operation) -> int:
        """Return `step` if all processes have it; None finds the greatest common step.

        Raises:
            StepNotFoundError: There is no such step; the message lists the common steps.
        """
        asked = None if step is None else check_step(step)
        steps = list((await self._in_common(asked, operation)).own)
        if asked is None and steps:
            return steps[-1]
        if asked is not None and asked in steps:
            return asked
        listed = ", ".join(map(str, steps[-10:])) or "none"
        raise StepNotFoundError(
            "there is no such step that all processes have on disks of their own; steps that they "
            f"have in common: {listed}",
            step=asked,
        )


def _restore_of(step: int | None) -> str:
    return "the restore" if step is None else f"the restore of step {step}"
