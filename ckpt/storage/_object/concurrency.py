"""The same done with many things at once, in bounded memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import anyio

from ckpt.errors import located

__all__ = ["each"]

T = TypeVar("T")
# As many as there can be requests at once. One for each object of a large step would take a
# gigabyte for every 200,000.
_MOST_TASKS = 1024


async def each(act: Callable[[T], Coroutine[Any, Any, object]], things: Iterable[T]) -> None:
    """Run `act` of each, many at once; how many requests that makes is bounded elsewhere."""
    left = iter(things)

    async def work(thing: T) -> None:
        await act(thing)
        for another in left:
            await act(another)

    with located():
        async with anyio.create_task_group() as tasks:
            for thing in itertools.islice(left, _MOST_TASKS):
                tasks.start_soon(work, thing)
