"""Signs of life of a process that is busy with what moves no bytes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

import anyio

from ckpt.coordination._operation import Operation
from ckpt.errors import located

__all__ = ["beating"]

# So often within the time limit, and so often in all: what takes longer hangs, and is noticed.
_BEATS = 8
_MOST_BEATS = 10 * _BEATS


@contextlib.asynccontextmanager
async def beating(
    operation: Operation, advance: Callable[[int], None] | None = None
) -> AsyncIterator[None]:
    """Let the others know, while the body runs, that this process lives.

    Also where nobody runs `watch` any more, as in what is shielded. That ends when ten times the
    time limit has gone by. `advance` is called instead of the operation's; others may wait, too.
    """
    with located():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_beat, operation, advance or operation.advance)
            yield
            tasks.cancel_scope.cancel()


async def _beat(operation: Operation, advance: Callable[[int], None]) -> None:
    for _ in range(_MOST_BEATS):
        await anyio.sleep(operation.seconds / _BEATS)
        advance(1)
        await operation.show_moves()
