"""`mgr.trash`: steps that were deleted and can come back, for asyncio and for plain programs."""

from __future__ import annotations

from typing import SupportsIndex

from ckpt._api.faces.plain_docs import plain_docs
from ckpt._runtime.loop import EngineLoop
from ckpt._steps.removal.trash import TrashedStep
from ckpt._tiers.factory import Service


class Trash:
    """The trash of a manager that was opened with `Deletion(trash=...)`.

    On a disk, a step in the trash is a directory in that folder. In a bucket its objects stay where
    they are, and only its manifest goes to `.ckpt-trash`. In both cases it takes as much space as
    before, until `empty` removes it.

    Example:
        ```python
        deletion = ckpt.policies.Deletion(trash="trash")
        async with ckpt.CheckpointManager(root, deletion=deletion) as mgr:
            await mgr.delete(100)
            await mgr.trash.undelete(100)
        ```
    """

    def __init__(self, loop: EngineLoop, service: Service) -> None:
        """Use the trash of the root that `service` serves."""
        self._loop = loop
        self._service = service

    async def steps(self) -> list[TrashedStep]:
        """Return what is in the trash, by step; a step may be there several times.

        Raises:
            InvalidArgumentError: The manager has no trash.

        Example:
            ```python
            deletion = ckpt.policies.Deletion(trash="trash")
            async with ckpt.CheckpointManager(root, deletion=deletion) as mgr:
                for each in await mgr.trash.steps():
                    print(each.step, each.deleted, each.path)
            ```
        """
        return await self._loop.run(self._service.trash.steps)

    async def undelete(self, step: SupportsIndex) -> None:
        """Take a step back: it is committed again, with all it had, in one atomic act.

        If it is in the trash several times, the one that was deleted last comes back. A policy may
        delete it again after the next save: pin it, if it is to stay.

        Raises:
            InvalidArgumentError: The manager has no trash.
            StepNotFoundError: The step is not in the trash.
            StepExistsError: There is such a step again.
            CorruptCheckpointError: In a bucket: objects of it are missing.
            ReadOnlyError: The manager is read-only.

        Example:
            ```python
            deletion = ckpt.policies.Deletion(trash="trash")
            async with ckpt.CheckpointManager(root, deletion=deletion) as mgr:
                await mgr.delete(100)
                await mgr.trash.undelete(100)
            ```
        """
        await self._loop.run(self._service.undelete, step)

    async def empty(self, older_than: float = 0.0) -> list[int]:
        """Remove steps from the trash for good; return which.

        Args:
            older_than: Only those that were deleted at least that many seconds ago.

        Raises:
            InvalidArgumentError: The manager has no trash, or `older_than` is not a number of
                seconds.
            ReadOnlyError: The manager is read-only.

        Cancellation: the step that is being removed is removed, the others stay.

        Example:
            ```python
            deletion = ckpt.policies.Deletion(trash="trash")
            async with ckpt.CheckpointManager(root, deletion=deletion) as mgr:
                await mgr.trash.empty(older_than=7 * 24 * 3600)
            ```
        """
        return await self._loop.run(self._service.empty_trash, older_than)


@plain_docs(Trash)
class SyncTrash:
    """The trash of a manager of `ckpt.sync` that was opened with `Deletion(trash=...)`.

    Example:
        ```python
        deletion = ckpt.policies.Deletion(trash="trash")
        with ckpt.sync.CheckpointManager(root, deletion=deletion) as mgr:
            mgr.delete(100)
            mgr.trash.undelete(100)
        ```
    """

    def __init__(self, loop: EngineLoop, service: Service) -> None:
        """Use the trash of the root that `service` serves."""
        self._loop = loop
        self._service = service

    def steps(self) -> list[TrashedStep]:
        """Return what is in the trash, by step."""
        return self._loop.call(self._service.trash.steps)

    def undelete(self, step: SupportsIndex) -> None:
        """Take a step back."""
        self._loop.call(self._service.undelete, step)

    def empty(self, older_than: float = 0.0) -> list[int]:
        """Remove steps from the trash for good; return which."""
        return self._loop.call(self._service.empty_trash, older_than)
