"""Republication: a step directory whose data stays where it is gets another manifest."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import anyio

from ckpt._engine.save.kept_lease import keep_lease
from ckpt.storage._base import Attempt, Storage


async def republish(
    storage: Storage,
    step_dir: str,
    write: Callable[[Attempt], Awaitable[Mapping[str, int]]],
    *,
    overwrite: bool = True,
    replacing: str | None = None,
    give_up: Callable[[Attempt], Awaitable[None]] | None = None,
) -> None:
    """Publish an attempt that takes little to write.

    Args:
        storage: The root.
        step_dir: The step directory.
        write: Writes all files of the attempt, the manifest last; returns their sizes by path.
        overwrite: Whether an existing step directory is replaced.
        replacing: Exactly the step directory of that attempt is replaced; see `Storage.publish`.
        give_up: Ends an attempt that is not published; None discards it.

    Raises:
        StepExistsError: The step directory exists and may not be replaced.
        StepDeletedError: The step directory of `replacing` is gone.
        StorageError: The store refused.

    Cancellation: operations under way are waited for, and nothing is changed, unless publishing had
    begun: then the step is complete.
    """
    attempt: Attempt | None = await storage.begin(step_dir)
    assert attempt is not None
    try:
        async with anyio.create_task_group() as tasks:
            keeper = anyio.CancelScope()
            tasks.start_soon(keep_lease, storage, attempt, keeper)
            files = await write(attempt)
            # Not cancelled from here on: it must be known what the store has done.
            with anyio.CancelScope(shield=True):
                await storage.publish(
                    attempt, overwrite=overwrite, replacing=replacing, files=files
                )
                attempt = None
            keeper.cancel()
    finally:
        if attempt is not None:
            with anyio.CancelScope(shield=True):
                await (give_up or storage.discard)(attempt)
