"""Operations as collectives: act for all processes, act together, or gather a value from each."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import anyio

from ckpt._job.agreement.heartbeat import beating
from ckpt._job.agreement.operation import Operation
from ckpt.errors import located

T = TypeVar("T")


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
