"""The processes of a job that share a root: what they agree on, and what only the primary does.

A job of one process has no peers: everything here returns at once then.
"""

from __future__ import annotations

import contextlib
import json
import logging
import uuid
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import anyio

from ckpt._format.digests import digest
from ckpt._format.manifest import JsonValue
from ckpt._plan.ownership import ProcessGroup
from ckpt.coordination._base import Coordinator
from ckpt.coordination._collectives import acted, gathered, together
from ckpt.coordination._failures import unpack_error
from ckpt.coordination._operation import FAILED, Operation
from ckpt.coordination._own_disks import has_own_disks, name_of_disks
from ckpt.coordination._signs import introduce
from ckpt.errors import CheckpointError, CoordinationError, CoordinationTimeoutError

__all__ = ["Peers"]

logger = logging.getLogger("ckpt")

T = TypeVar("T")

_FOLDER = "ckpt"
# Nobody should wait for what an operation has left to be removed.
_TIDY_SECONDS = 1.0
# Kinds name steps, so there are ever more of them; calls about one step are close together.
_MOST_KINDS = 10_000


class Peers:
    """The processes of a job, as one manager of this one sees them. Used on the engine's loop.

    Attributes:
        index: Number of this process; process 0 is the primary.
        count: How many there are.
        budget_bytes: The staging budget that all of them have, once they are opened.
        own_disks: Whether each of them has a root of its own.
        seconds: How long is waited for a process that gives no sign of life.
    """

    def __init__(
        self, coordinator: Coordinator, seconds: float, location: str, budget_bytes: int
    ) -> None:
        """Find the other processes through `coordinator`.

        Args:
            coordinator: The job.
            seconds: How long is waited for a process that gives no sign of life.
            location: The root; all processes have the same, unless they have disks of their own.
            budget_bytes: The staging budget of this process.
        """
        self.index = coordinator.process_index
        self.count = coordinator.process_count
        self.budget_bytes = budget_bytes
        self.own_disks = has_own_disks(coordinator)
        self._coordinator = coordinator
        self.seconds = seconds
        self._location = location
        self._turns: dict[str, int] = {}
        self._under_way: weakref.WeakSet[Operation] = weakref.WeakSet()
        self._name = ""
        # Made on the engine's loop.
        self._opening: anyio.Lock | None = None

    @property
    def is_primary(self) -> bool:
        """Whether this process decides, and publishes."""
        return self.index == 0

    @property
    def team(self) -> ProcessGroup:
        """The processes, as plans see them."""
        return ProcessGroup(self.index, self.count, "local" if self.own_disks else "shared")

    @property
    def publishes(self) -> bool:
        """Whether this process writes to its root on its own account."""
        return self.is_primary or self.own_disks

    @property
    def is_alone(self) -> bool:
        """Whether there is no other process."""
        return self.count == 1

    def turn(self, kind: str) -> int:
        """Return how many operations of a kind came before; in the order of the calls."""
        turn = self._turns.pop(kind, 0)
        self._turns[kind] = turn + 1
        if len(self._turns) > _MOST_KINDS:
            del self._turns[next(iter(self._turns))]
        return turn

    async def operation(self, kind: str, turn: int, what: str) -> Operation:
        """Return what all processes do together in their turn.

        Args:
            kind: Kind of the operation. All processes begin those of one kind in the same order.
            turn: Its turn among them.
            what: What it is, for messages.

        Raises:
            CoordinationError: The processes could not agree on a name for this manager.
        """
        try:
            await self._open()
        except BaseException as error:
            if self._name:
                # The others have heard the name, and go on to this operation.
                operation = self._operation(f"{self._name}/{kind}/{turn}", what)
                await operation.fail(error)
                await self.ended(operation)
            elif self._turns.get(kind) == turn + 1:
                # Nothing came of the turn, on any process; who was missed has not counted it.
                self._turns[kind] = turn
            raise
        while True:
            operation = self._operation(f"{self._name}/{kind}/{turn}", what)
            if self.is_alone:
                return operation
            try:
                await self._answer(introduce(self._coordinator.key_values(), self.index, what))
                if not await self._was_missed(operation):
                    return operation
            except BaseException as error:
                # Also where it was cancelled: the others would wait for this process.
                await operation.fail(error)
                await self.ended(operation)
                raise
            # The others have gone on without this process: it is about their next one.
            await self.ended(operation)
            turn = self.turn(kind)

    async def withdraw(
        self, kind: str, what: str, error: BaseException, turn: int | None = None
    ) -> None:
        """Tell the others that this process cannot do with them what they may wait for.

        Arguments are those of `operation`, and the error; None takes the next turn. Never raises,
        and is bounded.
        """
        turn = self.turn(kind) if turn is None else turn
        if self.is_alone:
            return
        with anyio.move_on_after(_TIDY_SECONDS, shield=True):
            try:
                operation = await self.operation(kind, turn, what)
                await operation.fail(error)
                await self.ended(operation)
            except Exception as failure:
                logger.debug("the others were not told: %s", failure)

    async def _was_missed(self, operation: Operation) -> bool:
        """Tell whether the others have waited in vain for this process."""
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
        """Let the others know that this process lives, whatever they wait for it with.

        One save may have to wait here for the one before it.
        """
        for operation in self._under_way:
            operation.advance(nbytes)

    async def ended(self, operation: Operation) -> None:
        """Say that this process has the outcome of an operation, or the error. Idempotent.

        The last process to say so removes what the operation has left; until then, others may still
        have to read it. Never raises, and ends in a bounded time, also when cancelled.
        """
        if not self.is_alone and operation in self._under_way:
            self._under_way.discard(operation)
            await self._tidy(operation.name)

    async def _tidy(self, name: str) -> None:
        store = self._coordinator.key_values()
        with anyio.move_on_after(_TIDY_SECONDS, shield=True):
            try:
                if await store.add(f"{name}/ended") == self.count:
                    await store.drop(name)
            except Exception as error:
                # Also of a coordinator of somebody else's: what was done is done.
                logger.debug("what %s has left was not removed: %s", name, error)

    async def on_primary(
        self, kind: str, what: str, act: Callable[[], Awaitable[JsonValue]]
    ) -> JsonValue:
        """Return what `act` gives on the primary; the others wait for it.

        Args:
            kind: What is done to what: every process counts the calls of each kind.
            what: The same, for messages.
            act: Awaited on the primary only.

        Raises:
            CheckpointError: What `act` raised, on every process.
            CoordinationError: The primary does not answer.
        """
        if self.is_alone:
            return await act()
        operation = await self.operation(kind, self.turn(kind), what)
        try:
            if not self.is_primary:
                told: JsonValue = json.loads(await operation.conclude(None))
                return told
            value = await acted(operation, act)
            # It is done, so the others hear of it also where this is cancelled now; a bounded time.
            with anyio.CancelScope(shield=True):
                await operation.decide()
                await operation.conclude(json.dumps(value).encode())
            return value
        except BaseException as error:
            # Nothing that was waited for stays behind.
            await operation.fail(error)
            raise
        finally:
            await self.ended(operation)

    async def failed(self, operation: Operation) -> None:
        """Remove what processes reported for an operation that has failed; never raises."""
        if self.is_alone or not self.is_primary:
            return
        with anyio.move_on_after(_TIDY_SECONDS, shield=True):
            try:
                await self._coordinator.key_values().drop(f"{operation.name}/report")
            except Exception as error:
                logger.debug("what was reported was not removed: %s", error)

    async def act(self, kind: str, what: str, act: Callable[[], Awaitable[JsonValue]]) -> JsonValue:
        """Return what `act` gives on the primary, or here where every process has its own root.

        Arguments and errors are those of `on_primary`.
        """
        if not self.own_disks:
            return await self.on_primary(kind, what, act)
        return await self.all_or_none(kind, what, lambda _: act())

    def part(self, operation: Operation, name: str) -> Operation:
        """Return an operation within another one; all processes give it the same new name."""
        return operation.part(name)

    async def gathered(
        self, operation: Operation, value: JsonValue, name: str = "gathered"
    ) -> list[Any]:
        """Return what every process gives, in their order; each waits for all.

        Once of every name in an operation, of which it is a part.
        """
        return await gathered(operation, value, name)

    async def all_or_none(
        self, kind: str, what: str, act: Callable[[Operation], Awaitable[T]]
    ) -> T:
        """Return what `act` gives here, once it has succeeded on all processes.

        Args:
            kind: Kind of the operation; see `operation`.
            what: What it is, for messages.
            act: Awaited on every process.

        Raises:
            CheckpointError: What was raised on one of them, on all of them.
            CoordinationTimeoutError: One of them gives no sign of life.
        """
        turn = self.turn(kind)
        operation = await self.operation(kind, turn, what)
        if self.is_alone:
            return await act(operation)
        try:
            return await together(operation, partial(act, operation))
        finally:
            await self.ended(operation)

    async def together(self, operation: Operation, act: Callable[[], Awaitable[T]]) -> T:
        """Return what `act` gives here, once it has succeeded on all processes.

        `operation` is either final then, or has failed; errors are those of `all_or_none`.
        """
        return await together(operation, act)

    async def _open(self) -> None:
        """Agree on a name for this manager that nobody else uses, and on a budget."""
        if self.is_alone or self._name:
            return
        self._opening = self._opening or anyio.Lock()
        # Shielded, and bounded: who has a turn comes to where the others hear of its cancellation.
        with anyio.CancelScope(shield=True):
            await self._opening.acquire()
        try:
            if not self._name:
                await self._open_now()
        finally:
            self._opening.release()

    async def _open_now(self) -> None:
        with anyio.CancelScope(shield=True):
            opening = await self._next_opening()
        try:
            self._take(await self._agree(opening))
        except BaseException as error:
            told = await opening.settle(error)
            if opening.is_decided:
                # Too late: unless the others hear of this error instead, they have the name.
                with anyio.CancelScope(shield=True), contextlib.suppress(CheckpointError):
                    self._take(json.loads(await opening.conclude(None) or b"{}"))
            if told is error:
                raise
            raise told from error
        finally:
            await self.ended(opening)

    def _take(self, found: object) -> None:
        """Take the name and the budget that the primary gives to all."""
        if not isinstance(found, dict) or not {"name", "budget"} <= set(found):
            raise CoordinationError(f"the primary gave {found!r:.60} instead of a name")
        self.budget_bytes = int(found["budget"])
        self._name = f"{_FOLDER}/{found['name']}"

    async def _next_opening(self) -> Operation:
        """Return what opens this manager; every process opens those of a root in the same order."""
        # Roots of their own may be called differently, so there are names for them.
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
        if self.is_alone or self._name:
            return
        with anyio.move_on_after(_TIDY_SECONDS, shield=True):
            try:
                opening = await self._next_opening()
                await opening.fail(error)
                await self.ended(opening)
            except Exception as failure:
                logger.debug("the others were not told: %s", failure)

    async def _agree(self, opening: Operation) -> object:
        """Return what the primary gives to all: a name and a budget."""
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
        """Return the answer to a request of what the processes share, or raise in time."""
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
