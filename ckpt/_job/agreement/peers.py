"""`Peers`: the processes of a job, as one manager sees them, and the operations they do together.

Every process makes the same calls, and each call that concerns all of them is one `Operation`. All
processes have to find the same name for it without asking each other:

    ckpt/opening/<root>/<n>           the n-th opening of this root by a manager
    ckpt/<id>/<kind>/<turn>           the `turn`-th operation of this kind of a manager

`n` is counted in the shared values, because processes may have opened the root before; the primary
chooses `id` in the opening. The turns are counted here, in the order of the calls, so that no
request is needed for them. They are counted by kind, and kinds name steps, so that a call that one
process makes and another does not harms that step only.

A process may come to an operation that the others have given up, because it was missing. It sees
its number among the missing, and takes the next turn, as the others do.
"""

from __future__ import annotations

import contextlib
import json
import logging
import uuid
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import anyio

from ckpt._format.manifest import JsonValue
from ckpt._format.manifest_head import digest
from ckpt._job.agreement.failures import introduce, unpack_error
from ckpt._job.agreement.operation import FAILED, Operation, acted, together
from ckpt.coordination._base import Coordinator
from ckpt.coordination._jobs import has_own_disks, name_of_disks
from ckpt.errors import CheckpointError, CoordinationError, CoordinationTimeoutError

logger = logging.getLogger("ckpt")

T = TypeVar("T")

_FOLDER = "ckpt"
# Seconds for removing the values of an operation, and for reporting an error to the others. The
# caller has its own outcome by then, and the store itself may have failed.
_TIDY_SECONDS = 1.0
# Kinds name steps, so there are ever more of them. Calls about one step are close together, so the
# oldest kinds can be forgotten.
_MOST_KINDS = 10_000


class Peers:
    """The processes of a job, two or more, as one manager sees them. Used on the engine's loop.

    Attributes:
        index: Number of this process; process 0 is the primary.
        budget_bytes: The staging budget of each of them, once the manager is opened.
        own_disks: True if each of them has a root of its own.
        seconds: Time to wait for a process that gives no sign of life.
    """

    def __init__(
        self, coordinator: Coordinator, seconds: float, location: str, budget_bytes: int
    ) -> None:
        """Find the other processes through `coordinator`.

        Args:
            coordinator: The job.
            seconds: Time to wait for a process that gives no sign of life.
            location: The root; all processes have the same, unless they have disks of their own.
            budget_bytes: The staging budget of this process.
        """
        self.index: int = coordinator.process_index
        self.count: int = coordinator.process_count
        self.budget_bytes: int = budget_bytes
        self.own_disks: bool = has_own_disks(coordinator)
        self._coordinator = coordinator
        self.seconds = seconds
        self._location = location
        self._turns: dict[str, int] = {}
        # Operations that others may wait in; weak, since `ended` is not called for all of them.
        self._under_way: weakref.WeakSet[Operation] = weakref.WeakSet()
        # Beginning of the names of all operations of this manager; empty until it is opened.
        self._name = ""
        # Made on the engine's loop.
        self._opening: anyio.Lock | None = None

    def turn(self, kind: str) -> int:
        """Return the number of earlier operations of a kind, in the order of the calls."""
        turn = self._turns.pop(kind, 0)
        self._turns[kind] = turn + 1
        if len(self._turns) > _MOST_KINDS:
            del self._turns[next(iter(self._turns))]
        return turn

    async def operation(self, kind: str, turn: int, what: str) -> Operation:
        """Return the operation that all processes do together in a turn.

        Args:
            kind: Kind of the operation. All processes begin those of one kind in the same order.
            turn: Turn of the operation in its kind.
            what: Name of the operation, for messages.

        Raises:
            CoordinationError: The processes could not agree on a name for this manager.
        """
        try:
            await self._open()
        except BaseException as error:
            if self._name:
                # The opening failed here after the others had received the name, so they go on to
                # this operation and would wait in it.
                operation = self._operation(f"{self._name}/{kind}/{turn}", what)
                await operation.fail(error)
                await self.ended(operation)
            elif self._turns.get(kind) == turn + 1:
                # No process has come to this turn. It is given back, because a process that was
                # missed has not counted it.
                self._turns[kind] = turn
            raise
        while True:
            operation = self._operation(f"{self._name}/{kind}/{turn}", what)
            try:
                await self._answer(introduce(self._coordinator.key_values(), self.index, what))
                if not await self._was_missed(operation):
                    return operation
            except BaseException as error:
                # Also when cancelled: the others would wait for this process.
                await operation.fail(error)
                await self.ended(operation)
                raise
            # The others have gone on without this process; it joins their next one.
            await self.ended(operation)
            turn = self.turn(kind)

    async def withdraw(
        self, kind: str, what: str, error: BaseException, turn: int | None = None
    ) -> None:
        """Tell the others that this process cannot take part in an operation they may wait in.

        The arguments are those of `operation`, and the error; without a turn, the next one is
        taken. Never raises, and ends in a bounded time.
        """
        turn = self.turn(kind) if turn is None else turn
        with anyio.move_on_after(_TIDY_SECONDS, shield=True):
            try:
                operation = await self.operation(kind, turn, what)
                await operation.fail(error)
                await self.ended(operation)
            except Exception as failure:
                logger.debug("the others were not told: %s", failure)

    async def _was_missed(self, operation: Operation) -> bool:
        """Return True if the others have waited in vain for this process."""
        store = self._coordinator.key_values()
        verdict = await self._answer(store.wait(f"{operation.name}/verdict", 0))
        if verdict is None or verdict[:1] != FAILED:
            return False
        return self.index in getattr(unpack_error(verdict[1:]), "missing", ())

    def _operation(self, name: str, what: str) -> Operation:
        store = self._coordinator.key_values()
        operation = Operation(store, self.index, self.count, name, what, self.seconds)
        self._under_way.add(operation)
        return operation

    def advance(self, nbytes: int) -> None:
        """Show the others, in all operations that are under way, that this process lives.

        While one save moves bytes here, a later one may wait for it, and the others for the later
        one.
        """
        for operation in self._under_way:
            operation.advance(nbytes)

    async def ended(self, operation: Operation) -> None:
        """Record that this process has the outcome of an operation, or its error. Idempotent.

        The last process to do so removes the values of the operation; until then, others may still
        have to read them. Never raises, and ends in a bounded time, also when cancelled.
        """
        if operation in self._under_way:
            self._under_way.discard(operation)
            await self._tidy(operation.name)

    async def _tidy(self, name: str) -> None:
        store = self._coordinator.key_values()
        with anyio.move_on_after(_TIDY_SECONDS, shield=True):
            try:
                if await store.add(f"{name}/ended") == self.count:
                    await store.drop(name)
            except Exception as error:
                # Any exception, since the coordinator may be the user's; the outcome stays valid.
                logger.debug("what %s has left was not removed: %s", name, error)

    async def on_primary(
        self, kind: str, what: str, act: Callable[[], Awaitable[JsonValue]]
    ) -> JsonValue:
        """Return the result of `act` on the primary; the others wait for it.

        Args:
            kind: The action and its object; every process counts the calls of each kind.
            what: The same, for messages.
            act: Awaited on the primary only.

        Raises:
            CheckpointError: The error that `act` raised, on every process.
            CoordinationError: The primary does not answer.
        """
        operation = await self.operation(kind, self.turn(kind), what)
        try:
            if self.index != 0:
                outcome: JsonValue = json.loads(await operation.conclude(None))
                return outcome
            value = await acted(operation, act)
            # Shielded, and bounded: the action is done, and the others must hear of it.
            with anyio.CancelScope(shield=True):
                await operation.decide()
                await operation.conclude(json.dumps(value).encode())
            return value
        except BaseException as error:
            # The others hear of the error, and calls that wait for this operation here end.
            await operation.fail(error)
            raise
        finally:
            await self.ended(operation)

    async def failed(self, operation: Operation) -> None:
        """Remove the reports of processes for an operation that has failed; never raises."""
        if self.index != 0:
            return
        with anyio.move_on_after(_TIDY_SECONDS, shield=True):
            try:
                await self._coordinator.key_values().drop(f"{operation.name}/report")
            except Exception as error:
                logger.debug("what was reported was not removed: %s", error)

    @contextlib.asynccontextmanager
    async def all_of(self, kind: str, what: str) -> AsyncIterator[Operation]:
        """Run the body on all processes; it succeeds on all of them, or fails on all.

        Raises:
            CheckpointError: The error that one of them raised, on all of them.
            CoordinationTimeoutError: A process gives no sign of life.
        """
        operation = await self.operation(kind, self.turn(kind), what)
        try:
            async with together(operation):
                yield operation
        finally:
            await self.ended(operation)

    async def all_or_none(
        self, kind: str, what: str, act: Callable[[Operation], Awaitable[T]]
    ) -> T:
        """Return the result of `act` here, once it has succeeded on all processes; see `all_of`."""
        async with self.all_of(kind, what) as operation:
            found = await act(operation)
        return found

    async def _open(self) -> None:
        """Agree on a name for this manager that no other manager uses, and on a budget."""
        if self._name:
            return
        self._opening = self._opening or anyio.Lock()
        # Shielded, and bounded: a process that took its turn must get far enough to report its
        # cancellation.
        with anyio.CancelScope(shield=True):
            await self._opening.acquire()
        try:
            if not self._name:
                await self._open_now()
        finally:
            self._opening.release()

    async def _open_now(self) -> None:
        # Shielded, since the count it takes cannot be given back.
        with anyio.CancelScope(shield=True):
            opening = await self._next_opening()
        try:
            self._take(await self._agree(opening))
        except BaseException as error:
            agreed = await opening.settle(error)
            if opening.is_decided:
                # It is too late to fail: the others have the name by now, unless they hear of this
                # error. Without the name this process could not tell them of its failures.
                with anyio.CancelScope(shield=True), contextlib.suppress(CheckpointError):
                    self._take(json.loads(await opening.conclude(None) or b"{}"))
            if agreed is error:
                raise
            raise agreed from error
        finally:
            await self.ended(opening)

    def _take(self, found: object) -> None:
        """Take the name and the budget that the primary gives to all."""
        if not isinstance(found, dict) or not {"name", "budget"} <= set(found):
            raise CoordinationError(f"the primary gave {found!r:.60} instead of a name")
        self.budget_bytes = int(found["budget"])
        self._name = f"{_FOLDER}/{found['name']}"

    async def _next_opening(self) -> Operation:
        """Return the opening of this manager; all processes open those of a root in one order."""
        # Private disks may be mounted at different paths, so `OwnDisks` has names for them.
        name = name_of_disks(self._coordinator) if self.own_disks else self._location
        place = f"{'own' if self.own_disks else 'common'}-{digest(name.encode())}"
        store, what = self._coordinator.key_values(), f"opening {self._location}"
        await self._answer(introduce(store, self.index, what))
        while True:
            turn = await self._answer(store.add(f"{_FOLDER}/opened/{place}/{self.index}"))
            opening = self._operation(f"{_FOLDER}/opening/{place}/{turn}", what)
            if not await self._was_missed(opening):
                return opening
            await self.ended(opening)

    async def cannot_open(self, error: BaseException) -> None:
        """Tell the others why this process cannot open the root; never raises, and is bounded."""
        if self._name:
            return
        with anyio.move_on_after(_TIDY_SECONDS, shield=True):
            try:
                opening = await self._next_opening()
                await opening.fail(error)
                await self.ended(opening)
            except Exception as failure:
                logger.debug("the others were not told: %s", failure)

    async def _agree(self, opening: Operation) -> object:
        """Return the name and the budget that the primary gives to all."""
        about = {"location": self._location, "budget": self.budget_bytes}
        reports = await opening.report(json.dumps(about).encode())
        agreed = None
        if reports is not None:
            budget = min(int(json.loads(each)["budget"]) for each in reports)
            agreed = json.dumps({"name": uuid.uuid4().hex, "budget": budget}).encode()
            await opening.decide()
        found: object = json.loads(await opening.conclude(agreed))
        return found

    async def _answer(self, request: Awaitable[T]) -> T:
        """Return the answer to a request to the shared values, or raise in time."""
        with anyio.move_on_after(self.seconds):
            return await request
        error = CoordinationTimeoutError(
            f"opening {self._location}, process {self.index} of {self.count}: no answer for "
            f"{self.seconds:g} s of what the processes share. jax.distributed keeps that in "
            "process 0, which may be stopped or cut off; if it is only slow, raise "
            "Timeouts(coordination=...)"
        )
        error.missing = (0,)
        raise error
