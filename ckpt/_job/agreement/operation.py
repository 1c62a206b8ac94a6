"""One action that all processes of a job do together, such as one save; the calls are at the end.

    primary             lead(value)  ... report(part) -> parts   decide()   ...   conclude(outcome)
    the others          lead(None)   ... report(part)                             conclude(None)
    all, while working  watch(), advance(bytes)                  any, at any time: fail(error)

An operation consists of values by name that are set once (`KeyValues`), and of nothing else:

    <name>/begin        the value of the primary          set by it, or by the first to fail
    <name>/report/g/i   the report of process i           set by process i
    <name>/verdict      "decided", or the first failure   the election: set by the first to come
    <name>/outcome      the outcome of the operation      set by the primary, or the first to fail
    <name>/life/i       signs of life                     set again and again

Each process waits for one value only, and a process that fails sets all values that others can be
waiting for. So no process has to ask twice, and a failure is heard at once. An operation of n
processes costs each of them five requests, and the primary n/32 more to read the reports.
"""

from __future__ import annotations

import contextlib
import json
import logging
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import anyio
import anyio.lowlevel

from ckpt._job.agreement.failures import (
    DeadlineKeyValues,
    Pulse,
    Signs,
    Stage,
    beating,
    hello,
    missing_text,
    pack_error,
    silence,
    unpack_error,
    who,
)
from ckpt.coordination._base import KeyValues
from ckpt.errors import CheckpointError, CoordinationError, CoordinationTimeoutError, located

_logger = logging.getLogger(__name__)

T = TypeVar("T")

# First byte of a value.
_GIVEN, FAILED = b"g", b"f"
_COUNT = struct.Struct(">I")
# Number of reports read by one request, so that the answer stays within limits.
_GROUP = 32
# Number of times, within the time limit, that signs of life are given and looked for.
_BEATS = 6
# Longest delay of an error, in seconds, for reporting it to the others.
_TELL_SECONDS = 1.0


class Operation:
    """One action that all processes do together; every process makes one of the same name.

    Only the primary, process 0, gives it a beginning and an outcome, and only the primary can make
    it final (`decide`). If any process fails before that, all of them raise the first error. No
    wait is longer than the time limit without a sign of life of the awaited processes. Every method
    may be cancelled; the caller then passes the cancellation to `fail`, as it does with every
    error.

    With one process everything returns at once and nothing is shared.

    Attributes:
        name, what, seconds: As passed to the constructor.

    Example:
        ```python
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(operation.watch)
                begin = await operation.lead(plan if index == 0 else None)
                part = await write(begin, operation.advance)
                parts = await operation.report(part)
                if parts is not None:
                    await operation.decide()
                    outcome = await publish(parts)
                outcome = await operation.conclude(outcome if index == 0 else None)
                tasks.cancel_scope.cancel()
        except BaseException as error:
            raise await operation.settle(error) from error.__cause__
        ```
    """

    def __init__(
        self, key_values: KeyValues, index: int, count: int, name: str, what: str, seconds: float
    ) -> None:
        """Make the operation; nothing is shared yet.

        Args:
            key_values: The values that the processes share.
            index: Number of this process.
            count: Number of processes.
            name: The same on all processes, and never used before, not even for an earlier attempt
                at the same action.
            what: The action, for messages: "the save of step 5".
            seconds: Time for which a process may give no sign of life.
        """
        self._values = key_values
        label = f"{what}, process {index} of {count}"
        self._shared = DeadlineKeyValues(key_values, name, label, seconds)
        self._index = index
        self._count = count
        self.name = name
        self.what = what
        self.seconds = seconds
        self._slice = seconds / _BEATS
        self._pulse = Pulse(self._shared, index)
        self._decided = False
        self._awaited: str | None = None
        self._received: tuple[bytes, CheckpointError] | None = None
        self._said: bytes | None = None

    @property
    def is_decided(self) -> bool:
        """True if this process knows that the operation is final; see `decide`."""
        return self._decided

    @property
    def _alone(self) -> bool:
        return self._count == 1

    def part(self, name: str) -> Operation:
        """Return an operation within this one; all processes give it the same new name.

        The part ends on its own, and shares the signs of life of the whole: a process that is busy
        with another part is not missed.
        """
        found = Operation(
            self._values, self._index, self._count, f"{self.name}/{name}", self.what, self.seconds
        )
        found._pulse = self._pulse
        return found

    async def lead(self, value: bytes | None) -> bytes:
        """Give the value to begin with (primary), or wait for it (others); return it.

        Raises:
            CheckpointError: Another process has failed.
            CoordinationTimeoutError: The primary does not come.
            CoordinationError: The processes disagree about their number, or the shared values fail.
        """
        if self._alone:
            return value or b""
        await self._pulse.show()
        if self._index == 0:
            mine = value or b""
            data = await self._shared.set_or_get("begin", _GIVEN + _COUNT.pack(self._count) + mine)
            if data is not None:
                self._opened(data)
                raise CoordinationError(
                    f"{self.what}: its name {self.name!r} was used before; every attempt needs a "
                    "name of its own"
                )
            return mine
        data = await self._from_primary("begin", "begin")
        self._check_count(data)
        return data[_COUNT.size :]

    async def report(self, value: bytes) -> list[bytes] | None:
        """Report that this process has done its part.

        Returns:
            The values of all processes, in their order, as soon as all have reported (primary), or
            None at once (others).

        Raises:
            CheckpointError: Another process has failed.
            CoordinationTimeoutError: Processes give no sign of life.
            CoordinationError: The shared values cannot be reached.
        """
        if self._alone:
            return [value]
        if self._index == 0:
            # A group may hold two errors; one is raised.
            with located():
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._raise_failure)
                    values = await self._gather(value)
                    tasks.cancel_scope.cancel()
            return values
        data = await self._shared.set_or_get(_report(self._index), value)
        if data is not None:
            await self._look_for_failure()
            raise CoordinationError(
                f"{self.what}: process {self._index} has reported before; two processes have that "
                "number, or one attempt has used the name of another"
            )
        return None

    async def decide(self) -> None:
        """Make the operation final: from here on no failure of another process undoes it (primary).

        Raises:
            CheckpointError: Another process has failed before this.
            CoordinationError: The shared values cannot be reached.
        """
        if not self._alone:
            data = await self._shared.set_or_get("verdict", _GIVEN)
            if data is not None:
                self._opened(data)
        self._decided = True

    async def conclude(self, value: bytes | None) -> bytes:
        """Give the outcome (primary), or wait for it (others); return it.

        Raises:
            CheckpointError: Another process has failed.
            CoordinationTimeoutError: The primary gives no sign of life.
            CoordinationError: The shared values cannot be reached.
        """
        if self._alone:
            return value or b""
        if self._index == 0:
            mine = value or b""
            data = await self._shared.set_or_get("outcome", _GIVEN + mine)
            return mine if data is None else self._opened(data)
        return await self._from_primary("outcome", "publish")

    async def fail(self, error: BaseException) -> bool:
        """Tell all others that this process has failed. Never raises, and ends in a bounded time.

        This works while the caller is being cancelled, too. Of several failures, all processes
        raise the first one (`settle` returns it). After `decide` only the primary can still report
        an error: the others raise it instead of getting an outcome.

        Returns:
            False if the primary had decided before, so that the operation has not failed; True if
            it has failed, or its state is unknown.
        """
        if self._alone:
            return not self._decided
        with anyio.move_on_after(_TELL_SECONDS, shield=True):
            try:
                return await self._fail(error)
            except Exception as failure:
                _logger.debug("%s: the others cannot be told of an error: %s", self.what, failure)
        return not self._decided

    async def settle(self, error: BaseException) -> BaseException:
        """Tell all others as `fail` does, and return the error to raise here: the first one."""
        await self.fail(error)
        cancelled = isinstance(error, anyio.get_cancelled_exc_class())
        # `watch` may have received the error that was reported here.
        others = self._received is not None and self._received[0] != self._said
        return self._received[1] if self._received and others and not cancelled else error

    async def watch(self) -> None:
        """Give signs of life, and raise the failure of another process, until cancelled.

        Run it in a task group next to the work, from before `lead` to after `conclude`.

        Raises:
            CheckpointError: Another process has failed.
            CoordinationError: The shared values cannot be reached.
        """
        if self._alone:
            return
        with located():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._raise_failure)
                while True:
                    await anyio.sleep(self._slice)
                    await self._pulse.show_moves()

    def advance(self, amount: int) -> None:
        """Note that so many bytes were moved; `watch` shows the others that this process lives."""
        self._pulse.advance(amount)

    async def show_moves(self) -> None:
        """Tell the others at once if bytes were moved; a failure to do so is ignored."""
        if not self._alone:
            try:
                await self._pulse.show_moves()
            except CoordinationError as failure:
                _logger.debug("%s: no sign of life could be given: %s", self.what, failure)

    async def _fail(self, error: BaseException) -> bool:
        me = who(self._index, self._count, hello())
        said = self._said = FAILED + pack_error(error, me)
        verdict = await self._shared.set_or_get("verdict", said)
        first = verdict is None
        decided = verdict is not None and verdict[:1] == _GIVEN
        self._decided = self._decided or decided
        if verdict is not None and not decided:
            self._keep_error(verdict)
        if first:
            await self._shared.set_or_get("begin", said)
        if first or (decided and self._index == 0):
            await self._shared.set_or_get("outcome", said)
        if self._awaited is not None:
            # The value is not used: setting it ends the pending request of this process.
            await self._shared.set_or_get(self._awaited, b"")
        return not decided

    async def _from_primary(self, key: str, stage: Stage) -> bytes:
        signs = Signs([0], anyio.current_time())
        while True:
            left = signs.patience(0, anyio.current_time(), self.seconds)
            data = await self._shared.wait(key, min(self._slice, max(left, 0.001)))
            if data is not None:
                return self._opened(data)
            # The service runs where the primary does: without an answer there is no sign of life.
            with anyio.move_on_after(max(left, self._slice / 2)):
                # The process that failed may have died before it could tell all others.
                await self._look_for_failure()
                sign = await self._pulse.of_primary()
                if sign is not None:
                    signs.see(0, sign, anyio.current_time())
            if signs.silent(anyio.current_time(), self.seconds):
                raise await self._too_late([0], stage, signs)

    async def _gather(self, own: bytes) -> list[bytes]:
        signs = Signs(range(1, self._count), anyio.current_time())
        values = {0: own}
        for first in range(0, self._count, _GROUP):
            group = range(max(first, 1), min(first + _GROUP, self._count))
            for index in group:
                if index in values:
                    continue
                values[index] = await self._arrival(index, signs)
                signs.arrived(index)
                if index == group[0] and len(group) > 1:
                    found = await self._shared.numbered(_report_group(index), self._count)
                    for other, data in found.items():
                        values[other] = data
                        signs.arrived(other)
        return [values[index] for index in range(self._count)]

    async def _arrival(self, index: int, signs: Signs) -> bytes:
        self._awaited = _report(index)
        while True:
            # The others wait for the primary, which waits, too, and has to show them that it lives.
            # Its own wait is bounded.
            if self._pulse.is_due(self._slice):
                await self._pulse.show()
            left = signs.patience(index, anyio.current_time(), self.seconds)
            data = await self._shared.wait(self._awaited, min(self._slice, max(left, 0.001)))
            if data is not None:
                self._awaited = None
                return data
            for other, sign in (await self._pulse.of_all(self._count)).items():
                signs.see(other, sign, anyio.current_time())
            if signs.silent(anyio.current_time(), self.seconds):
                await self._raise_if_silent(signs)

    async def _raise_if_silent(self, signs: Signs) -> None:
        """Raise for silent processes; a process that has reported meanwhile is not silent."""
        silent = signs.silent(anyio.current_time(), self.seconds / 2)
        for group in sorted({_report_group(index) for index in silent}):
            for index in await self._shared.numbered(group, self._count):
                signs.arrived(index)
        if signs.silent(anyio.current_time(), self.seconds):
            # All processes that went silent together are named, even if the last sign of some was
            # seen a little later.
            missing = signs.silent(anyio.current_time(), self.seconds / 2)
            raise await self._too_late(missing, "write", signs)

    async def _too_late(
        self, missing: list[int], stage: Stage, signs: Signs
    ) -> CoordinationTimeoutError:
        label = f"{self.what}: process {self._index} has waited"
        names = await missing_text(missing, self._count, signs, self._values)
        return silence(label, names, missing, stage, self.seconds)

    async def _raise_failure(self) -> None:
        while True:
            data = await self._shared.wait("verdict", self.seconds)
            if data is not None:
                self._opened(data)
                # Decided: no process can make it fail now.
                return

    async def _look_for_failure(self) -> None:
        data = await self._shared.wait("verdict", 0)
        if data is not None:
            self._opened(data)

    def _check_count(self, data: bytes) -> None:
        theirs = _COUNT.unpack_from(data)[0] if len(data) >= _COUNT.size else None
        if theirs != self._count:
            raise CoordinationError(
                f"{self.what}: process {self._index} takes part as one of {self._count}, and the "
                f"primary as one of {theirs}; give all of them coordinators of the same job"
            )

    def _opened(self, data: bytes) -> bytes:
        """Return a value, or raise the failure that was set in its place."""
        if data[:1] == FAILED:
            raise self._keep_error(data)
        return data[1:]

    def _keep_error(self, data: bytes) -> CheckpointError:
        if self._received is None or self._received[0] != data:
            self._received = data, unpack_error(data[1:])
        return self._received[1]


def _report(index: int) -> str:
    return f"{_report_group(index)}/{index}"


def _report_group(index: int) -> str:
    return f"report/{index // _GROUP}"


async def acted(operation: Operation, act: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `act`; meanwhile, show the others that this process lives."""
    with located():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(operation.watch)
            async with beating(operation):
                value = await act()
            tasks.cancel_scope.cancel()
    return value


@contextlib.asynccontextmanager
async def together(operation: Operation) -> AsyncIterator[None]:
    """Run the body on all processes; it succeeds on all of them, or fails on all.

    Afterwards `operation` is either final, or has failed.

    Raises:
        CheckpointError: The error that one of them raised, on all of them.
        CoordinationTimeoutError: A process gives no sign of life.
    """
    try:
        with located():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(operation.watch)
                yield
                every = await operation.report(b"")
                if every is not None:
                    await operation.decide()
                await operation.conclude(None if every is None else b"")
                tasks.cancel_scope.cancel()
    except BaseException as error:
        # All raise the first error, so that all go on in the same way.
        agreed = await operation.settle(error)
        if agreed is error:
            raise
        raise agreed from error


async def gathered(operation: Operation, value: Any, name: str) -> list[Any]:
    """Return the JSON values of all processes, in their order; each waits for all.

    The gathering is a part of an operation; a name can be used once in an operation.
    """
    found: list[Any] = await concluded(operation, value, name, lambda every: every)
    return found


async def concluded(
    operation: Operation, value: Any, name: str, conclude: Callable[[list[Any]], Any]
) -> Any:
    """Return the result that the primary makes of the JSON values of all; each waits for it.

    It is a part of an operation; a name can be used once in an operation.

    Args:
        operation: The operation of all processes.
        value: The value of this process.
        name: Name of the part.
        conclude: Called on the primary with the values, in the order of the processes; returns a
            JSON value.
    """
    part = operation.part(name)
    try:
        every = await part.report(json.dumps(value).encode())
        joined = None
        if every is not None:
            outcome = conclude([json.loads(each) for each in every])
            await part.decide()
            joined = json.dumps(outcome).encode()
        return json.loads(await part.conclude(joined))
    except BaseException as error:
        await part.fail(error)
        raise
