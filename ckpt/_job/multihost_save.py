"""The save of several processes, as one of them sees it; `SoloSave` has the same methods.

    primary      heed  refusal  begin(attempt)   write   report -> all   decide   publish   conclude
    the others   heed  refusal  begin(join)      write   report                             outcome
    own disks    heed  refusal  begin(attempt)   write   report -> all   ready   publish   published

The primary begins the attempt and sends its id to the others; every process writes its own chunks;
the primary gathers the places of all chunks, writes the manifest over them, publishes, and sends
the outcome to the others. So a process waits at most twice: the primary for the reports, the others
for the id of the attempt and for the outcome. With private disks every process does all of it on
its own disk, and publishes when all are ready to.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
from msgspec.structs import replace

from ckpt._engine.save.save_request import SaveRequest
from ckpt._engine.save.session import SaveSession
from ckpt._format.manifest import ItemEntry, Manifest, decode, encode
from ckpt._format.manifest_head import FILE_NAME, MAX_BYTES, peek
from ckpt._job.agreement.failures import beating
from ckpt._job.agreement.operation import Operation, gathered
from ckpt._job.agreement.peers import Peers
from ckpt._job.division import ProcessGroup
from ckpt._job.process_reports import SaveReport, decode_report, encode_report
from ckpt._job.publication import DiskItem, ProcessItem, SharedItem, publish_apart, publish_together
from ckpt._job.solo import Ask, Begin, Clear, Cleared, Join, StartedSave, Take
from ckpt._runtime.threads import run_in_thread
from ckpt.errors import (
    CheckpointError,
    CommitCancelledError,
    CoordinationError,
    CoordinationTimeoutError,
    InvalidArgumentError,
    StorageError,
    located,
)
from ckpt.storage._base import Attempt, Storage

logger = logging.getLogger("ckpt")


class MultihostSave:
    """A save that several processes make together, as one of them sees it.

    Attributes:
        process: Number of this process.
        count: Number of processes.
        group: The processes and the number of this one.
        leads: True if this process decides for all.
        own_disks: True if every process has a root of its own.
        publishes: True if this process begins an attempt, and publishes it.
    """

    def __init__(self, peers: Peers, kind: str, what: str, order: anyio.Lock | None = None) -> None:
        """Take the next turn of `kind`; nothing is sent to the others yet.

        Args:
            peers: The processes.
            kind: Kind of the operation; see `Peers.operation`.
            what: Description of the save, for messages.
            order: Lock held while this save enters its operation, so that all processes enter their
                saves in the order of the calls, though one may take long to begin.
        """
        self.group: ProcessGroup = ProcessGroup(
            peers.index, peers.count, "local" if peers.own_disks else "shared"
        )
        self.process: int = peers.index
        self.count: int = peers.count
        self.leads: bool = peers.index == 0
        self.own_disks: bool = peers.own_disks
        self.publishes: bool = self.leads or peers.own_disks
        self._peers = peers
        self._kind = kind
        self._what = what
        # Taken before anything is awaited: the processes pair their saves by the order of calls.
        self._turn = peers.turn(kind)
        self._order = order or anyio.Lock()
        # With private disks a save has two operations. `_whole` ends when all are ready to publish,
        # so until then any failure fails all. `_publishing` is the part after that: a failure in it
        # cannot be undone on the disks that have published, and is only reported.
        self._whole: Operation | None = None
        self._current: Operation | None = None
        self._publishing: Operation | None = None
        # The primary's first message; the first method that needs it asks for it, once.
        self._announced: dict[str, Any] | None = None
        self._announcing = anyio.Lock()
        self._may_refuse = False
        # Set as soon as this process begins to report a failure: any error that `_watch` gets from
        # then on may be its own.
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
        """The operation that the processes share at the moment."""
        assert self._current is not None
        return self._current

    def advance(self, nbytes: int) -> None:
        """Report `nbytes` moved bytes, which count as a heartbeat of this process."""
        self._peers.advance(nbytes)

    @contextlib.asynccontextmanager
    async def taking_part(self, *, may_refuse: bool = False) -> AsyncIterator[None]:
        """Enter the operation and run the body; cancel it as soon as another process has failed.

        An error of the body is sent to the others; all raise the first one.

        Args:
            may_refuse: True if the primary may refuse the save; its answer is awaited from the
                beginning, since it may come before this process asks.

        Raises:
            CheckpointError: The failure of some process.
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
        """Enter the operation, after the saves that were called before this one."""
        try:
            await self._order.acquire()
        except BaseException as error:
            # The turn is taken already, so the others would wait for this process.
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
            # report that to the others instead.
            await self.settle(error)
            raise

    async def _watch(self) -> None:
        try:
            await self.operation.watch()
        except CheckpointError as error:
            if self._is_failing:
                # The save has failed here, which may be the cause of this error; the save ends with
                # its own error.
                await anyio.sleep_forever()
            if not isinstance(error, CoordinationError):
                raise
            if not self._decided:
                # Settled before the body is cancelled, as in `_await_announcement`.
                await self.settle(error)
                raise
            # The step is going to be published, even if the others fail.
            logger.warning("the other processes cannot be reached any more: %s", error)
            await anyio.sleep_forever()

    def busy(self) -> AbstractAsyncContextManager[None]:
        """Send heartbeats for a while in which this process moves no bytes."""
        # Sent in all operations of this process: a later save waits for this one.
        return beating(self.operation, self._peers.advance)

    async def heed(self, take: Take, *, in_doubt: bool) -> None:
        """Raise the failure of an earlier save: the primary decides, so that all raise it.

        Args:
            take: Returns the failure to raise, or None; only the primary calls it. The other
                processes need not check what the primary's program has checked.
            in_doubt: True if, as far as this process knows, an earlier save may have failed. This
                process then waits for the primary, whose first message says so if none has.
        """
        word = self.operation.part("heed")
        failure = take() if self.leads else None
        try:
            if failure is not None:
                raise failure
            if self.leads or in_doubt:
                await word.lead(b"" if self.leads else None)
        except BaseException as error:
            # No process waits for the message now.
            await word.fail(error)
            raise

    async def refusal(self, ask: Ask) -> str | None:
        """Return the reason to refuse the save, or None; the primary asks for all."""
        if self.own_disks and self._may_refuse:
            # All processes look at their disks together before the attempt is announced.
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

    async def cleared(self, storage: Storage, request: SaveRequest, clear: Clear) -> Cleared:
        """Make way for the save in its root, by `clear`, where this process publishes it.

        The call does not wait for the end: the other processes do not know whether the save may be
        skipped.
        """
        if not self.publishes:
            return request, [], False
        request, others, _ = await clear(await self._replacing_part(storage, request))
        return request, others, False

    async def _replacing_part(self, storage: Storage, request: SaveRequest) -> SaveRequest:
        """Return a request that replaces a step which not all disks have, and so is incomplete.

        If the processes share a root, return the request itself.

        Raises:
            InvalidArgumentError: The request is to replace, and every process has its own disk.
        """
        if not self.own_disks:
            return request
        if request.replaces_any:
            raise InvalidArgumentError(
                "if_exists='replace': where processes have disks of their own, not all can be "
                "replaced at once, and a failure in between would lose the step. Delete it first",
                step=request.step,
            )
        data = await storage.read(request.step_dir, FILE_NAME, MAX_BYTES)
        summary = None if data is None else await run_in_thread(peek, data)
        save = None if summary is None else summary.save
        if set(await gathered(self.operation, save, "replaced")) == {save}:
            return request
        return replace(request, if_exists="replace")

    async def begin(self, begin: Begin, join: Join, created_ns: int) -> StartedSave:
        """Begin an attempt, or join the one that the primary has begun.

        Raises:
            CoordinationError: The primary refuses the save.
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
        """Return the primary's announcement, an attempt or a refusal; waits for it."""
        async with self._announcing:
            if self._announced is None:
                self._announced = json.loads(await self.operation.lead(None))
        return self._announced

    def item(self, name: str, *, per_process: bool) -> SharedItem | DiskItem | ProcessItem:
        """Return the part that this process takes in one item."""
        if per_process:
            return ProcessItem(self.process, self.count)
        return (DiskItem if self.own_disks else SharedItem)(name, self.group)

    async def publish(
        self, session: SaveSession, request: SaveRequest, entries: Mapping[str, ItemEntry]
    ) -> Manifest:
        """Write the manifest, and publish the step: the primary for all, or each its own.

        Returns:
            The manifest; if another process has published, without its leaves and files.
        """
        publish = publish_apart if self.own_disks else publish_together
        return await publish(self, session, request, entries)

    async def if_publishing(self, act: Callable[[], Awaitable[None]]) -> None:
        """Call `act` if this process publishes the save."""
        if self.publishes:
            await act()

    async def discard(self, storage: Storage, attempt: Attempt) -> None:
        """Remove what this process has written of an attempt that is not published."""
        await storage.discard(attempt, joined=True)

    def was_heard(self, error: BaseException) -> bool:
        """Return True if the primary has raised the error of an earlier save.

        The same error may still be on its way to the earlier commit in this process.
        """
        is_told = isinstance(error, CheckpointError) and not isinstance(error, CoordinationError)
        return is_told and not self.leads

    def is_raised_later(self, error: BaseException) -> bool:
        """Return True if all processes get the error of this save in their next call.

        This call may have returned in some of them.
        """
        return isinstance(error, StorageError)

    async def report(self, own: SaveReport) -> list[SaveReport] | None:
        """Report to the primary the chunks of this process, or that it is ready to publish.

        Returns:
            On the primary the reports of all processes, by number; elsewhere None.
        """
        every = await self.operation.report(await run_in_thread(encode_report, own))
        if every is None:
            return None
        return await run_in_thread(lambda: [decode_report(each) for each in every])

    async def settle(self, error: BaseException) -> BaseException:
        """Report the failure of this process; return the error that all raise. Idempotent.

        A cancellation stays a cancellation in this process.
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
        """Announce that the step is going to be published; no other process can prevent it now.

        Raises:
            CheckpointError: The earlier failure of another process.
        """
        await self.operation.decide()
        self._decided = True

    async def ready(self) -> None:
        """Wait until all processes are ready to publish, each on its own disk.

        Raises:
            CheckpointError: The failure of another process.
            CoordinationTimeoutError: A process gives no sign of life.
        """
        if self.leads:
            await self.operation.decide()
        await self.operation.conclude(b"" if self.leads else None)
        self._current = self._publishing

    async def published(self) -> None:
        """Announce that this process has published, and wait until all have.

        Raises:
            CheckpointError: The failure of another process.
            CoordinationTimeoutError: A process gives no sign of life.
        """
        # The watch around the whole save does not see failures in this part of it.
        async with self._watched(may_refuse=False):
            if await self.operation.report(b"") is not None:
                await self.operation.decide()
            await self.operation.conclude(b"" if self.leads else None)

    async def conclude(self, manifest: Manifest) -> None:
        """Announce that the step is published; a failed announcement does not undo that."""
        try:
            await self.operation.conclude(encode(_summary(manifest)))
        except CoordinationError as error:
            logger.warning("step %s is saved, and the others do not know: %s", manifest.step, error)

    async def outcome(self) -> Manifest:
        """Wait for the manifest that the primary publishes; return it without leaves and files.

        Cancellation: ends the save of all processes, unless the primary is publishing it; then this
        process waits for the outcome.
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


def _summary(manifest: Manifest) -> Manifest:
    """Return a manifest without its large parts; all reports on the step are made from the rest."""
    items = {
        name: ItemEntry(handler=item.handler, nbytes=item.nbytes)
        for name, item in manifest.items.items()
    }
    shared = {path: file for path, file in manifest.files.items() if file.shared}
    return replace(manifest, items=items, files=shared)
