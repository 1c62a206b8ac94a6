"""Republication: a step directory gets another manifest, and its data stays in place."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import anyio

from ckpt._engine.save.lease_renewal import renew_lease
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
    """Publish an attempt that is quick to write.

    Args:
        storage: Storage of the root.
        step_dir: Name of the step directory.
        write: Writes all files of the attempt, the manifest last; returns their sizes by path.
        overwrite: True if an existing step directory is replaced.
        replacing: Id of an attempt; exactly its step directory is replaced, see `Storage.publish`.
        give_up: Ends an attempt that is not published; None discards it.

    Raises:
        StepExistsError: The step directory exists and may not be replaced.
        StepDeletedError: The step directory of `replacing` is gone.
        StorageError: The store refused.

    Cancellation: waits for operations under way, and changes nothing, unless publishing has begun:
    then the step is complete.
    """
    attempt: Attempt | None = await storage.begin(step_dir)
    assert attempt is not None
    try:
        async with anyio.create_task_group() as tasks:
            renewal = anyio.CancelScope()
            tasks.start_soon(renew_lease, storage, attempt, renewal)
            files = await write(attempt)
            # Shielded from here on: the result of the store's act must be known.
            with anyio.CancelScope(shield=True):
                await storage.publish(
                    attempt, overwrite=overwrite, replacing=replacing, files=files
                )
                attempt = None
            renewal.cancel()
    finally:
        if attempt is not None:
            with anyio.CancelScope(shield=True):
                await (give_up or storage.discard)(attempt)
