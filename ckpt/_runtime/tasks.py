"""Tasks: many operations at once, but no more tasks than memory allows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import anyio

from ckpt.errors import located

T = TypeVar("T")
# One task for each object of a large step would take a gigabyte for every 200,000 objects.
_MOST_TASKS = 1024


async def for_each(
    act: Callable[[T], Coroutine[Any, Any, object]], things: Iterable[T], most: int = _MOST_TASKS
) -> None:
    """Run `act` on each thing, up to `most` at once.

    Raises:
        Exception: The first error that a call raised; see `located`.
    """
    left = iter(things)

    async def work(thing: T) -> None:
        await act(thing)
        for another in left:
            await act(another)

    with located():
        async with anyio.create_task_group() as tasks:
            for thing in itertools.islice(left, most):
                tasks.start_soon(work, thing)
