"""`PartialSave`: one step that is saved in several calls."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ckpt._api import waits
from ckpt._api.base import PartialSaveBase, refused
from ckpt._commit import StepInfo
from ckpt._runtime.futures import outcome, settled


class PartialSave(PartialSaveBase):
    """One step that is saved in several calls; made by `CheckpointManager.partial`.

    Use it as `async with`: leaving the block publishes the step, which is then durable; an
    exception in the block discards all of it. Without the block, call `finalize` or `discard`.

    A step is saved whole or not at all. No part is visible before the step is published, and when a
    part cannot be saved, or a call is cancelled, everything is discarded. Only a part that is
    refused with an `InvalidArgumentError` because of its arguments alone changes nothing.

    Example:
        ```python
        async with mgr.partial(step) as part:
            await part.save({"params": state["params"]})
            await part.save({"opt_state": state["opt_state"]})
        print(part.info)
        ```
    """

    if not TYPE_CHECKING:
        __enter__ = __exit__ = refused(
            "use 'async with mgr.partial(...)', or with a manager of ckpt.sync "
            "'with mgr.partial(...)'"
        )

    async def __aenter__(self) -> Self:
        # plain: self._save.loop.check_caller()
        await self._settled(self._save.open())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._save.is_ended:
            return
        if error is None:
            await self.finalize()
            return
        self._note_failure(error)
        await self.discard()

    async def save(self, state: Any = None, *, items: Mapping[str, Any] | None = None) -> None:
        """Save one part: return once its snapshot is safe, and write it in the background.

        Once this returns, you may donate, delete or change everything you passed. All saves of the
        manager share its budget of staging memory: if there is no room, this waits until earlier
        parts are written.

        Args:
            state: A part of the step's one tree. Dicts are merged with those of earlier parts, at
                any depth; a part may only add keys.
            items: Named items instead, or parts of them if they are trees of dicts. A step has
                either unnamed parts or named items, not both.

        Raises:
            InvalidArgumentError: An argument is invalid, and nothing was changed; or an earlier
                part has something at a path of this one, and everything is discarded.
            UnsupportedLeafError: A leaf cannot be stored; the error names its path. Everything is
                discarded.
            StepExistsError: The step exists; raised by the first call if there is no block.
            ClosedError: The save was finalized or discarded before.
            CheckpointError: An earlier part could not be written. Everything is discarded.

        Cancellation: everything is discarded before the cancellation continues.

        Example:
            ```python
            async with mgr.partial(step) as part:
                await part.save(items={"model": state})
                await part.save(items={"config": {"lr": 0.1}})
            ```
        """
        # plain: self._save.loop.check_caller()
        part = self._save.check_part(state, items)
        await self._settled(self._save.open())
        await self._settled(self._save.add(part))

    async def finalize(self) -> StepInfo:
        """Wait until all parts are durable, publish the step, and return its `StepInfo`.

        Raises:
            InvalidArgumentError: No part was saved.
            ClosedError: The save was finalized or discarded before.
            CheckpointError: A part could not be written, or the step could not be published.
                Everything is discarded.

        Cancellation: everything is discarded before the cancellation continues; unless publishing
        had begun, then the step is complete.

        Example:
            ```python
            part = mgr.partial(step)
            await part.save(state)
            info = await part.finalize()
            ```
        """
        # plain: self._save.loop.check_caller()
        problem = self._save.finish()
        if problem is not None:
            await self._cancelled()
            raise problem
        try:
            self._info = await waits.committed(self._save.commit)
        except waits.cancelled():
            await self._cancelled()
            raise
        return self._info

    async def discard(self) -> None:
        """Remove everything that was saved. Does nothing if it was discarded before.

        Raises:
            ClosedError: The save was finalized.

        Example:
            ```python
            part = mgr.partial(step)
            await part.save(state)
            await part.discard()
            ```
        """
        # plain: self._save.loop.check_caller()
        self._save.discard()
        await waits.settled_shielded(self._save.ended)

    async def _settled(self, future: Future[None]) -> None:
        try:
            await settled(future)
        except waits.cancelled():
            await self._cancelled()
            raise
        outcome(future)

    async def _cancelled(self) -> None:
        self._save.cancel()
        await waits.settled_shielded(self._save.ended)
