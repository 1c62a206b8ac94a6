"""What is done to every disk where each process of a job has one of its own, or to none of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ckpt._steps.index import IndexedStep
from ckpt._steps.reader import StepReader
from ckpt._steps.retention import Retention
from ckpt.coordination._beats import beating
from ckpt.coordination._operation import Operation
from ckpt.coordination._peers import Peers
from ckpt.errors import StepNotFoundError

__all__ = ["act_if_common", "delete_anywhere", "superfluous_everywhere"]


async def superfluous_everywhere(
    peers: Peers, reader: StepReader, retention: Retention, operation: Operation
) -> dict[int, IndexedStep]:
    """Return what is to be deleted, as it is on this disk: steps of all, which none wants to keep.

    What only some disks have is no step, so policies neither count nor delete it.
    """
    own = await retention.superfluous(await reader.in_common(None, operation))
    every = await peers.gathered(operation, list(own), "superfluous")
    return {step: own[step] for step in sorted(set.intersection(*map(set, every)))}


async def act_if_common(
    reader: StepReader, step: int, act: Callable[[], Awaitable[None]], operation: Operation
) -> None:
    """Do something to a step that all disks have.

    Raises:
        StepNotFoundError: Not all have it; nothing was done anywhere.
    """
    await reader.common(step, operation)
    await act()


async def delete_anywhere(
    peers: Peers, delete: Callable[[], Awaitable[None]], operation: Operation
) -> None:
    """Delete what some of the disks have.

    Raises:
        StepNotFoundError: None has it.
    """
    missing = None
    try:
        async with beating(operation):
            await delete()
    except StepNotFoundError as error:
        missing = error
    if not any(await peers.gathered(operation, missing is None)) and missing is not None:
        raise missing
