"""The processes' side of a save: `SoloSave` for a process alone, `MultihostSave` for a job.

    primary      heed  refusal  begin(attempt)   write   report -> all   decide   publish   conclude
    the others   heed  refusal  begin(join)      write   report                             outcome
    own disks    heed  refusal  begin(attempt)   write   report -> all   ready   publish   published

The primary begins the attempt and tells the others its id; every process writes the chunks that are
its own; the primary gathers what was written where, writes the manifest over all of it, publishes,
and tells the others how that ended. So a process waits at most twice: the primary for the reports,
the others for the id of the attempt and for the outcome. With private disks every process does all
of it on its own disk, and publishes when all are ready to.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ckpt._engine.save.joint.write_report import WriteReport, packed, unpacked
from ckpt._format.leaf_table import LeafTable
from ckpt._format.manifest import ItemEntry, Manifest, decode, encode
from ckpt._plan.ownership import ProcessGroup
from ckpt._runtime.threads import run_in_thread
from ckpt._vitals.signs import UNKNOWN
from ckpt.coordination._collectives import gathered
from ckpt.coordination._heartbeat import beating
from ckpt.coordination._operation import Operation
from ckpt.coordination._peers import Peers
from ckpt.errors import (
    CheckpointError,
    CommitCancelledError,
    CoordinationError,
    CoordinationTimeoutError,
    located,
)
from ckpt.storage._base import Attempt

logger = logging.getLogger("ckpt")

# The failure of an earlier save that is to be raised; each is given out once.
Take = Callable[[], BaseException | None]
# Why a save is not to be made, or None.
Ask = Callable[[], Awaitable[str | None]]
# Begins an attempt; joins the one of this id.
Begin = Callable[[], Awaitable[Attempt]]
Join = Callable[[str], Awaitable[Attempt]]


class StartedSave(Struct, frozen=True):
    """A save that has begun.

    Attributes:
        attempt: The attempt that this process writes to.
        save: Id of the attempt that the primary has begun: the same on all processes.
        created_ns: When that was, in Unix nanoseconds.
    """

    attempt: Attempt
    save: str
    created_ns: int


class SoloSave:
    """The save of a process that has no others: nothing is shared, and nothing is waited for.

    Attributes:
        group: This process.
        budget_bytes: The staging budget.
        is_alone, leads, publishes, own_disks: As of `MultihostSave`.
    """

    is_alone = leads = publishes = True
    own_disks = False
    group: ProcessGroup = ProcessGroup(0, 1)

    def __init__(self, budget_bytes: int) -> None:
        """Save with a staging budget of `budget_bytes`."""
        self.budget_bytes = budget_bytes

    def taking_part(self, *, may_refuse: bool = False) -> contextlib.nullcontext[None]:
        """Run the body."""
        return contextlib.nullcontext()

    def busy(self) -> contextlib.nullcontext[None]:
        """Run the body."""
        return contextlib.nullcontext()

    def advance(self, nbytes: int) -> None:
        """Do nothing: no process waits."""

    async def heed(self, take: Take, *, in_doubt: bool) -> None:
        """Raise what an earlier save has failed with, if that is to be raised."""
        failure = take()
        if failure is not None:
            raise failure

    async def refusal(self, ask: Ask) -> str | None:
        """Return why there is to be no save, or None."""
        return await ask()

    async def begin(self, begin: Begin, join: Join, created_ns: int) -> StartedSave:
        """Begin the attempt."""
        attempt = await begin()
        return StartedSave(attempt, attempt.id, created_ns)

    async def settle(self, error: BaseException) -> BaseException:
        """Return `error`."""
        return error


class MultihostSave:
    """A save that several processes make together, as one of them sees it.

    Attributes:
        group: Which of them this is.
        is_alone: False.
        leads: Whether this process decides for all.
        own_disks: Whether every process has a root of its own.
        publishes: Whether this process begins an attempt, and publishes it.
    """

    is_alone = False

    def __init__(self, peers: Peers, kind: str, what: str, order: anyio.Lock | None = None) -> None:
        """Take the next turn of `kind`; nothing is shared yet.

        Args:
            peers: The processes.
            kind: Kind of the operation; see `Peers.operation`.
            what: What is saved, for messages.
            order: Held while this save comes to the others, so that all processes come to their
                saves in the order of the calls, though one may take long to begin.
        """
        self.group: ProcessGroup = ProcessGroup(
            peers.index, peers.count, "local" if peers.own_disks else "shared"
        )
        self.leads: bool = peers.index == 0
        self.own_disks: bool = peers.own_disks
        self.publishes: bool = self.leads or peers.own_disks
        self._peers = peers
        self._kind = kind
        self._what = what
        # Now, before anything is awaited: the processes pair their saves by the order of calls.
        self._turn = peers.turn(kind)
        self._order = order or anyio.Lock()
        # With private disks a save has two operations. The whole ends when all are ready to
        # publish, so until then any failure fails all; `_publishing` is the part after that, in
        # which a failure cannot be undone on the disks that have published, and is only reported.
        self._whole: Operation | None = None
        self._current: Operation | None = None
        self._publishing: Operation | None = None
        # What the primary has said of the beginning; asked for once, by the first that needs it.
        self._announced: dict[str, Any] | None = None
        self._announcing = anyio.Lock()
        self._may_refuse = False
        # Set as soon as this process begins to report a failure: what `_watch` gets from then
        # on may be its own.
        self._is_failing = False
        self._settled: BaseException | None = None
        # Set on the primary once no other process can make the save fail.
        self._decided = False

    @property
    def budget_bytes(self) -> int:
        """The staging budget that all processes have."""
        return self._peers.budget_bytes

    @property
    def operation(self) -> Operation:
        """What the processes do together at the moment."""
        assert self._current is not None
        return self._current

    def advance(self, nbytes: int) -> None:
        """Show the others that this process lives: it has moved so many bytes."""
        self._peers.advance(nbytes)

    @contextlib.asynccontextmanager
    async def taking_part(self, *, may_refuse: bool = False) -> AsyncIterator[None]:
        """Come to the others and run the body; cancel it as soon as another process has failed.

        An error of the body is sent to the others; all raise the first one.

        Args:
            may_refuse: Whether the primary may refuse the save; its answer is awaited from the
                beginning, since it may come before this process asks.

        Raises:
            CheckpointError: What a process has failed with.
        """
        whole = await self._come()
        self._may_refuse = may_refuse
        try:
            async with self._watched(may_refuse=may_refuse and not self.leads):
                yield
        except BaseException as error:
            agreed = await self.settle(error)
            await self._peers.failed(whole)
            if agreed is error:
                raise
            raise agreed from error
        finally:
            await self._peers.ended(whole)

    async def _come(self) -> Operation:
        """Come to the operation, after the saves that were called before this one."""
        try:
            await self._order.acquire()
        except BaseException as error:
            # The turn is taken, so the others would wait for this process.
            await self._peers.withdraw(self._kind, self._what, error, self._turn)
            raise
        try:
            whole = await self._peers.operation(self._kind, self._turn, self._what)
        finally:
            self._order.release()
        self._whole = self._current = whole
        self._publishing = whole.part("end") if self.own_disks else None
        return whole

    @contextlib.asynccontextmanager
    async def _watched(self, *, may_refuse: bool) -> AsyncIterator[None]:
        """Cancel the body as soon as another process has failed, and raise its error."""
        # `located` takes the error out of the group.
        with located():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch)
                if may_refuse:
                    tasks.start_soon(self._await_announcement)
                yield
                tasks.cancel_scope.cancel()

    async def _await_announcement(self) -> None:
        try:
            await self._announcement()
        except CheckpointError as error:
            # Settled before the body is cancelled: the body only sees the cancellation, and would
            # tell the others of that instead.
            await self.settle(error)
            raise

    async def _watch(self) -> None:
        try:
            await self.operation.watch()
        except CheckpointError as error:
            if self._is_failing:
                # The save has failed here, and the error may come from that; it ends with its own.
                await anyio.sleep_forever()
            if not isinstance(error, CoordinationError):
                raise
            if not self._decided:
                # Settled before the body is cancelled, as in `_await_announcement`.
                await self.settle(error)
                raise
            # The step is going to be published, whatever becomes of the others.
            logger.warning("the other processes cannot be reached any more: %s", error)
            await anyio.sleep_forever()

    def busy(self) -> AbstractAsyncContextManager[None]:
        """Let the others know that this process lives while it moves no bytes, for a while."""
        # In all its operations: a later save waits for this one.
        return beating(self.operation, self._peers.advance)

    async def heed(self, take: Take, *, in_doubt: bool) -> None:
        """Raise what an earlier save has failed with: the primary decides, so that all raise it.

        Args:
            take: Gives what is to be raised, or None; only the primary calls it. What its program
                has checked, the others need not check.
            in_doubt: Whether an earlier save may have failed, as far as this process knows. It then
                waits for the primary, which says so in its first message if none has.
        """
        word = self.operation.part("heed")
        failure = take() if self.leads else None
        try:
            if failure is not None:
                raise failure
            if self.leads or in_doubt:
                await word.lead(b"" if self.leads else None)
        except BaseException as error:
            # Nobody waits for the word any more.
            await word.fail(error)
            raise

    async def refusal(self, ask: Ask) -> str | None:
        """Return why there is to be no save, or None: the primary asks, and tells the others."""
        if self.own_disks and self._may_refuse:
            # They look at their disks together before the attempt is announced.
            answer: str | None = None
            if self.leads:
                async with self.busy():
                    answer = await ask()
            refusal: Any = (await gathered(self.operation, answer, "decided"))[0]
        elif self.leads:
            async with self.busy():
                refusal = await ask()
        if self.leads:
            if refusal is not None:
                await self._announce({"refusal": refusal})
                # From here on failures of other processes change nothing.
                await self.operation.decide()
            return str(refusal) if refusal is not None else None
        if not self._may_refuse or (self.own_disks and refusal is None):
            return None
        return (await self._announcement()).get("refusal")

    async def begin(self, begin: Begin, join: Join, created_ns: int) -> StartedSave:
        """Begin an attempt, or join the one that the primary has begun.

        Raises:
            CoordinationError: The primary does not save.
        """
        attempt = None
        if self.publishes:
            async with self.busy():
                attempt = await begin()
        if self.leads:
            assert attempt is not None
            await self._announce({"attempt": attempt.id, "created": created_ns})
            return StartedSave(attempt, attempt.id, created_ns)
        announced = await self._announcement()
        refusal = announced.get("refusal")
        if refusal is not None:
            raise CoordinationError(
                f"process {self.group.index} saves this step, and process 0 does not: {refusal}. "
                "Give all processes the same policy, and the same force="
            )
        save = str(announced["attempt"])
        return StartedSave(attempt or await join(save), save, int(announced["created"]))

    async def _announce(self, announced: dict[str, Any]) -> None:
        await self.operation.lead(json.dumps(announced).encode())

    async def _announcement(self) -> dict[str, Any]:
        """Return what the primary begins with: an attempt, or a refusal; waits for it."""
        async with self._announcing:
            if self._announced is None:
                self._announced = json.loads(await self.operation.lead(None))
        return self._announced

    async def report(self, own: WriteReport) -> list[WriteReport] | None:
        """Tell the primary what this process has written, or is ready to publish.

        Returns:
            On the primary what every process has written, by number; elsewhere None.
        """
        every = await self.operation.report(await run_in_thread(packed, own))
        if every is None:
            return None
        return await run_in_thread(lambda: [unpacked(each) for each in every])

    async def settle(self, error: BaseException) -> BaseException:
        """Tell the others that this process has failed; return what all of them raise. Idempotent.

        A cancellation stays what it is here.
        """
        if self._settled is None:
            self._is_failing = True
            failure: BaseException = error
            if not isinstance(error, Exception):
                failure = CommitCancelledError("the save was cancelled")
            found = await self.operation.settle(failure)
            if self._publishing is not None and self._current is self._whole:
                assert self._whole is not None
                if self._whole.is_decided:
                    # The others are about to publish, or have: they would wait for this process.
                    await self._publishing.fail(failure)
            self._settled = error if found is failure else found
        return self._settled if isinstance(error, Exception) else error

    async def decide(self) -> None:
        """Say that the step is going to be published; no other process can prevent it any more.

        Raises:
            CheckpointError: What another process has failed with before.
        """
        await self.operation.decide()
        self._decided = True

    async def ready(self) -> None:
        """Wait until all processes are ready to publish, each on its own disk.

        Raises:
            CheckpointError: What another process has failed with.
            CoordinationTimeoutError: One gives no sign of life.
        """
        if self.leads:
            await self.operation.decide()
        await self.operation.conclude(b"" if self.leads else None)
        self._current = self._publishing

    async def published(self) -> None:
        """Say that this process has published, and wait until all have.

        Raises:
            CheckpointError: What another process has failed with.
            CoordinationTimeoutError: One gives no sign of life.
        """
        # The watch around the whole save does not hear what fails in this part of it.
        async with self._watched(may_refuse=False):
            if await self.operation.report(b"") is not None:
                await self.operation.decide()
            await self.operation.conclude(b"" if self.leads else None)

    async def conclude(self, manifest: Manifest) -> None:
        """Tell the others that the step is published; a failure to tell them does not undo it."""
        try:
            await self.operation.conclude(encode(_summary(manifest)))
        except CoordinationError as error:
            logger.warning("step %s is saved, and the others do not know: %s", manifest.step, error)

    async def outcome(self) -> Manifest:
        """Return what the primary has published, without leaves and files; waits for it.

        Cancellation: ends the save of all processes, unless the primary is publishing it; then that
        is waited for.
        """
        try:
            outcome = await self.operation.conclude(None)
        except anyio.get_cancelled_exc_class():
            if self._settled is not None:
                raise
            with anyio.CancelScope(shield=True):
                if await self.operation.fail(CommitCancelledError("the save was cancelled")):
                    raise
                # Too late: the primary had decided.
                outcome = await self.operation.conclude(None)
        except CoordinationTimeoutError as error:
            if 0 in error.missing:
                error.add_note("the step may be there all the same: look for it after a restart")
            raise
        return decode(outcome, where="the outcome")


JointSave = SoloSave | MultihostSave


def _summary(manifest: Manifest) -> Manifest:
    """Return a manifest without what takes room; what is told of the step follows from it."""
    items = {
        name: ItemEntry(handler=item.handler, nbytes=item.nbytes, leaves=_notable(item.leaves))
        for name, item in manifest.items.items()
    }
    shared = {path: file for path, file in manifest.files.items() if file.shared}
    return replace(manifest, items=items, files=shared)


def _notable(table: LeafTable) -> LeafTable:
    """Return the arrays whose values are not known to be finite and equal; without chunks."""
    are_arrays = np.array([form.dtype is not None for form in table.forms] or [False])[table.form]
    signs = table.signs
    if len(signs):
        are_notable = (signs["norm"] == UNKNOWN) | (signs["nonfinite"] > 0)
        are_notable[list(table.unequal)] = True
        chosen = np.flatnonzero(are_arrays & are_notable)
        signs = signs[chosen]
    else:
        # One says as much as all.
        chosen = np.flatnonzero(are_arrays)[:1]
    names = [table.names[number] for number in chosen.tolist()]
    forms = [replace(form, count=0) for form in table.forms] if names else []
    places = {number: at for at, number in enumerate(chosen.tolist())}
    unequal = {places[number]: each for number, each in table.unequal.items() if number in places}
    return LeafTable(names, forms, table.form[chosen], signs=signs, unequal=unequal)
