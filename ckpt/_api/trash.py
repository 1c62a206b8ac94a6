"""`Trash`: steps that were deleted and can come back."""

from __future__ import annotations

from typing import TYPE_CHECKING, SupportsIndex

from ckpt._runtime.loop import EngineLoop
from ckpt._steps.removal.trash import TrashedStep

if TYPE_CHECKING:
    from ckpt._steps.service import RootService


class Trash:
    """The trash of a manager that was opened with `Deletion(trash=...)`.

    On a disk, a step in the trash is a directory in that folder. In a bucket its objects stay where
    they are, and only its manifest goes to `.ckpt-trash`. In both cases it takes as much space as
    before, until `empty` removes it.

    Example:
        ```python
        async with ckpt.CheckpointManager(root, trash="trash") as mgr:
            await mgr.delete(100)
            await mgr.trash.undelete(100)
        ```
    """

    def __init__(self, loop: EngineLoop, service: RootService) -> None:
        """Use the trash of the root that `service` serves."""
        self._loop = loop
        self._service = service

    async def steps(self) -> list[TrashedStep]:
        """Return the steps in the trash, by step; a step may be there several times.

        Raises:
            InvalidArgumentError: The manager has no trash.

        Example:
            ```python
            async with ckpt.CheckpointManager(root, trash="trash") as mgr:
                for each in await mgr.trash.steps():
                    print(each.step, each.deleted, each.path)
            ```
        """
        return await self._loop.run(self._service.trash.steps)

    async def undelete(self, step: SupportsIndex) -> None:
        """Take a step back: it is committed again as it was, in one atomic operation.

        If the step is in the trash several times, the one that was deleted last comes back. A
        policy may delete it again after the next save: pin the step if it is to stay.

        Raises:
            InvalidArgumentError: The manager has no trash.
            StepNotFoundError: The step is not in the trash.
            StepExistsError: The step exists again.
            CorruptCheckpointError: In a bucket: objects of the step are missing.
            ReadOnlyError: The manager is read-only.

        Example:
            ```python
            async with ckpt.CheckpointManager(root, trash="trash") as mgr:
                await mgr.delete(100)
                await mgr.trash.undelete(100)
            ```
        """
        await self._loop.run(self._service.undelete, step)

    async def empty(self, older_than: float = 0.0) -> list[int]:
        """Remove steps from the trash permanently; return their numbers.

        Args:
            older_than: Remove only steps that were deleted at least that many seconds ago.

        Raises:
            InvalidArgumentError: The manager has no trash, or `older_than` is not a number of
                seconds.
            ReadOnlyError: The manager is read-only.

        Cancellation: a step whose removal has begun is removed; the others stay.

        Example:
            ```python
            async with ckpt.CheckpointManager(root, trash="trash") as mgr:
                await mgr.trash.empty(older_than=7 * 24 * 3600)
            ```
        """
        return await self._loop.run(self._service.empty_trash, older_than)
