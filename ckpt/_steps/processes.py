"""The processes of one root: a single process, several that share it, or several with own disks.

`OneProcess`, `SharedRoot` and `SeparateRoots` have the same methods, so that a manager does not ask
for the number of processes. In a single process every method acts at once, without any exchange.

                  one process   several, one root            several, a root each
    open          here          on the primary               on each
    steps         all           all                          those that every process has
    decided       here          on the primary               on each, from what all have
    judged        all           all                          those that every process has
    restoring     finds         the primary finds            all find what they have in common
    on_step       here          on the primary               on each, if all have the step
    everywhere    here          on the primary               on each, all or none
    delete        here          on the primary               on each that has the step
    save          SoloSave      MultihostSave: one manifest  MultihostSave: a manifest each
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import anyio
from msgspec import Struct

from ckpt._arguments import check_step
from ckpt._engine.restore.shared_reads import Broadcast
from ckpt._engine.save.multihost.multihost_save import JobSave, MultihostSave, SoloSave
from ckpt._events import Observer
from ckpt._format.manifest import JsonValue, decode, encode
from ckpt._redaction import redact
from ckpt._runtime.futures import CallingThread
from ckpt._runtime.loop import EngineLoop
from ckpt._runtime.threads import run_in_thread
from ckpt._steps.index import IndexedStep, StepIndex
from ckpt._steps.opened import OpenedStep
from ckpt._steps.removal.all_disks import CommonSteps, health_data, health_on_all, join_health
from ckpt._steps.removal.deletion_plan import DeletionPlan, common_deletions, kept_items
from ckpt._steps.removal.retention import Retention
from ckpt._steps.removal.trash import StepTrash
from ckpt._steps.restores.restore_arguments import check_broadcast
from ckpt._steps.unreadable import shortened
from ckpt.coordination._collectives import gathered
from ckpt.coordination._heartbeat import beating
from ckpt.coordination._operation import Operation
from ckpt.coordination._peers import Peers
from ckpt.errors import CheckpointError, CoordinationError, StepDeletedError, StepNotFoundError
from ckpt.keep._questions import SavedStep

logger = logging.getLogger("ckpt")

Act = Callable[[], Awaitable[JsonValue]]
# By step, the reason against it; an empty text for no reason.
Reasons = dict[int, str]
# Reads the steps of a disk in the form that policies take.
See = Callable[[Mapping[int, IndexedStep]], Awaitable[list[SavedStep]]]
# Returns the reason against a step; an empty text for no reason.
Judge = Callable[[SavedStep], str]

# The most bytes of a manifest that the primary sends to all other processes, in sum. The service of
# the job sends a MiB in 25 ms (docs/design/005): a large manifest is read faster from the storage,
# which serves all processes at once.
_MOST_HANDED_BYTES = 16 << 20


class FoundStep(Struct, frozen=True):
    """The step that all processes restore.

    Attributes:
        opened: The step, as this process has opened it.
        broadcast: The exchange of read bytes; None if each process reads what it needs.
    """

    opened: OpenedStep
    broadcast: Broadcast | None = None


class OneProcess:
    """A single process.

    Attributes:
        process: Number of this process in its job.
        count: Number of processes.
        owns_root: True if this process keeps a root tidy.
        steps: The steps that count.
        observers: Observers of the phases of a restore, beside the engine's.
    """

    process: int = 0
    count: int = 1
    owns_root = True
    observers: tuple[Observer, ...] = ()

    def __init__(self, index: StepIndex, budget_bytes: int) -> None:
        """Use the root of `index`, with a staging budget of `budget_bytes`."""
        self.steps = index
        self._budget_bytes = budget_bytes

    async def open(self, act: Callable[[], Awaitable[None]]) -> None:
        await act()

    async def decided(self, kind: str, what: str, act: Act) -> JsonValue:
        return await act()

    async def judged(self, see: See, judge: Judge) -> Reasons:
        """Return the reasons of `judge` against the steps that `see` reads."""
        return _judgements(await see(await self.steps.refresh()), judge)

    @contextlib.asynccontextmanager
    async def restoring(
        self,
        step: int | None,
        opened: OpenedStep | None,
        broadcast_bytes: int | None,
        caller: CallingThread,
    ) -> AsyncIterator[FoundStep]:
        """Find `step`, or the latest one, for the body to restore; `opened` is the known step."""
        check_broadcast(broadcast_bytes, own_disks=False)
        yield FoundStep(opened or await self.steps.found(step))

    async def on_primary(self, kind: str, step: int, what: str, act: Act) -> JsonValue:
        return await act()

    on_step = on_primary
    everywhere = on_primary
    delete = on_primary

    async def undelete(self, step: int, trash: StepTrash) -> None:
        await _restore_from_trash(step, trash)

    async def deletion_plan(self, saved: int, retention: Retention) -> None:
        """Return None: the retention makes the plan itself."""

    def save(self, kind: str, what: str) -> JobSave:
        """Return the part that this process takes in a save."""
        return SoloSave(self._budget_bytes)

    def withdraw(self, loop: EngineLoop, kind: str, what: str, error: Exception) -> None:
        """Do nothing: no process waits for a save that cannot begin."""


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

    def save(self, kind: str, what: str) -> JobSave:
        """Return the part that this process takes in a save; the save takes its turn now."""
        self._order = self._order or anyio.Lock()
        return MultihostSave(self.peers, kind, what, self._order)

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
        self.owns_root: bool = peers.index == 0
        self.steps = index

    async def open(self, act: Callable[[], Awaitable[None]]) -> None:
        """Open the root on the primary, which creates it and keeps it tidy."""
        if self.owns_root:
            try:
                await act()
            except BaseException as error:
                # Otherwise the other processes would wait for this one.
                await self.peers.cannot_open(error)
                raise

    async def decided(self, kind: str, what: str, act: Act) -> JsonValue:
        """Return the decision of `act` on the primary, which sends it to all."""
        return await self.peers.on_primary(kind, what, act)

    async def judged(self, see: See, judge: Judge) -> Reasons:
        """Return the reasons of `judge` against the steps that `see` reads, equal on all."""
        return _judgements(await see(await self._index.refresh()), judge)

    @contextlib.asynccontextmanager
    async def restoring(
        self,
        step: int | None,
        opened: OpenedStep | None,
        broadcast_bytes: int | None,
        caller: CallingThread,
    ) -> AsyncIterator[FoundStep]:
        """Agree on the step that the primary finds; the body succeeds on all processes or none.

        `opened` is the step if the primary has found it already.
        """
        async with self.peers.all_of("restore", _restore_of(step)) as operation:
            check_broadcast(broadcast_bytes, own_disks=False)
            try:
                found = await self._find_with_primary(step, opened, broadcast_bytes, operation)
                broadcast = None
                if broadcast_bytes is not None:
                    broadcast = Broadcast(self.peers, operation, broadcast_bytes, caller)
                yield FoundStep(found, broadcast)
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
        """Return the result of `act` on the primary; all processes see the same step."""
        return await self.on_primary(kind, step, what, act)

    async def everywhere(self, kind: str, step: int, what: str, act: Act) -> JsonValue:
        """Return the result of `act` on the primary; all processes see the same root."""
        return await self.on_primary(kind, step, what, act)

    async def delete(self, kind: str, step: int, what: str, act: Act) -> JsonValue:
        """Return the result of `act` on the primary, which deletes for all."""
        return await self.on_primary(kind, step, what, act)

    async def undelete(self, step: int, trash: StepTrash) -> None:

        async def act() -> None:
            await _restore_from_trash(step, trash)

        await self.on_primary("undelete", step, f"undeleting step {step}", act)

    async def deletion_plan(self, saved: int, retention: Retention) -> None:
        """Return None: the retention makes the plan itself."""


class SeparateRoots(_SeveralProcesses):
    """Several processes with a root each. A step counts if all of them have it."""

    owns_root = True

    def __init__(self, peers: Peers, index: StepIndex) -> None:
        super().__init__(peers, index)
        self._said_foreign = False

    @property
    def steps(self) -> SeparateRoots:
        """Itself: `refresh`, `latest` and `found` see the steps that all processes have."""
        return self

    async def open(self, act: Callable[[], Awaitable[None]]) -> None:
        try:
            await act()
        except BaseException as error:
            # Otherwise the other processes would wait for this one.
            await self.peers.cannot_open(error)
            raise

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
        async with self.peers.all_of("judge", "how healthy the steps are") as operation:
            common = await self._in_common(None, operation)
            own = _judgements(await self._seen(see, common, operation), judge)
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
    ) -> AsyncIterator[FoundStep]:
        """Find a step that all processes have; the body succeeds on all of them or none.

        They look again even if a step is `opened`: each process reads its own disk.
        """
        async with self.peers.all_of("restore", _restore_of(step)) as operation:
            check_broadcast(broadcast_bytes, own_disks=True)
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

    async def delete(self, kind: str, step: int, what: str, act: Act) -> JsonValue:
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
        if not any(each.nonfinite_leaves or each.unequal_leaves for each in everywhere):
            # No disk has odd leaves. The disks may differ only in whether that is known.
            return [
                replace(step, nonfinite_leaves=each.nonfinite_leaves)
                for step, each in zip(own, everywhere, strict=True)
            ]
        return join_health(
            own, await gathered(operation, await run_in_thread(health_data, own), "leaves")
        )

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
        own: JsonValue = [
            [each.step, each.save, each.nonfinite_leaves, each.unequal_leaves]
            for each in found.values()
        ]
        every = await gathered(operation, [asked, own], "steps")
        for other, _ in every:
            self._check_same(asked, other)
        disks = [{(step, save): counts for step, save, *counts in steps} for _, steps in every]
        common = [key for key in sorted(set.intersection(*map(set, disks))) if key[1]]
        return CommonSteps(
            {step: found[step] for step, _ in common},
            {key[0]: health_on_all(found[key[0]], [disk[key] for disk in disks]) for key in common},
        )

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


Processes = OneProcess | SharedRoot | SeparateRoots


def _judgements(steps: Sequence[SavedStep], judge: Judge) -> Reasons:
    return {each.step: judge(each) for each in steps}


async def _restore_from_trash(step: int, trash: StepTrash) -> None:
    """Take back the save of this step that was deleted last."""
    found = await trash.saves_of(step)
    if not found:
        raise await trash.missing(step)
    await trash.undelete(step, found[-1])


def _restore_of(step: int | None) -> str:
    return "the restore" if step is None else f"the restore of step {step}"
