"""`PartialSave` and `SyncPartialSave`: one step that is saved in several calls."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio

from ckpt._api.faces.coroutines import refused
from ckpt._api.faces.plain_docs import plain_docs
from ckpt._commit import StepInfo
from ckpt._runtime.futures import settled, settled_here
from ckpt._runtime.tracebacks import outcome
from ckpt._steps.saves.partial import OpenSave
from ckpt.errors import CheckpointError

# Why a save was discarded that its owner dropped.
_DROPPED = "it was dropped without finalize() or discard()"


class _PartialSaveBase:
    """What both classes share: what never waits."""

    def __init__(self, save: OpenSave, owner: object = None) -> None:
        """Called by a manager only; it is kept alive as the `owner`."""
        self._save = save
        self._owner = owner
        self._info: StepInfo | None = None
        weakref.finalize(self, save.give_up, _DROPPED).atexit = False

    @property
    def step(self) -> int | None:
        """The step."""
        return self._save.request.step

    @property
    def info(self) -> StepInfo:
        """The `StepInfo` of the step.

        Raises:
            CheckpointError: The step is not published yet: the block has not ended.
        """
        if self._info is None:
            raise CheckpointError(
                "the partial save is not published yet: read info after the block, or after "
                "finalize()",
                step=self.step,
            )
        return self._info

    def __repr__(self) -> str:
        return repr(self._save)

    def _note_failure(self, error: BaseException) -> None:
        """Add an earlier failure of the save, which may not have been seen, to `error`."""
        failure = self._save.failure()
        if failure is not None and failure is not error:
            error.add_note(f"the partial save of step {self.step} had failed: {failure}")


class PartialSave(_PartialSaveBase):
    """One step that is saved in several calls; made by `CheckpointManager.partial`.

    Use it as `async with`: leaving the block publishes the step, which is then durable; an
    exception in the block discards all of it. Without the block, call `finalize` or `discard`.

    It is all or nothing. No part is visible before the step is published, and when a part cannot be
    saved, or a call is cancelled, everything is discarded. Only a part that is refused with an
    `InvalidArgumentError` because of its arguments alone changes nothing.

    Example:
        ```python
        async with mgr.partial(step) as part:
            await part.save({"params": state["params"]})
            await part.save({"opt_state": state["opt_state"]})
        print(part.info)
        ```
    """

    if not TYPE_CHECKING:
        __enter__ = __exit__ = refused("use 'async with mgr.partial(...)'")

    async def __aenter__(self) -> Self:
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
            UnsupportedLeafError: A leaf cannot be stored; names its path. Everything is discarded.
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
        problem = self._save.finish()
        if problem is not None:
            await self._cancelled()
            raise problem
        try:
            self._info = await self._save.commit
        except anyio.get_cancelled_exc_class():
            await self._cancelled()
            raise
        assert self._info is not None
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
        self._save.discard()
        with anyio.CancelScope(shield=True):
            await settled(self._save.ended)

    async def _settled(self, future: Future[None]) -> None:
        try:
            await settled(future)
        except anyio.get_cancelled_exc_class():
            await self._cancelled()
            raise
        outcome(future)

    async def _cancelled(self) -> None:
        self._save.cancel()
        with anyio.CancelScope(shield=True):
            await settled(self._save.ended)


@plain_docs(PartialSave)
class SyncPartialSave(_PartialSaveBase):
    """One step that is saved in several calls; made by `ckpt.sync.CheckpointManager.partial`.

    Use it as `with`: leaving the block publishes the step, which is then durable; an exception in
    the block discards all of it. Without the block, call `finalize` or `discard`.

    It is all or nothing. No part is visible before the step is published, and when a part cannot be
    saved, or an interrupt (Ctrl-C) ends a call, everything is discarded. Only a part that is
    refused with an `InvalidArgumentError` because of its arguments alone changes nothing.

    Example:
        ```python
        with mgr.partial(step) as part:
            part.save({"params": state["params"]})
            part.save({"opt_state": state["opt_state"]})
        print(part.info)
        ```
    """

    if not TYPE_CHECKING:
        __aenter__ = __aexit__ = refused("use 'with mgr.partial(...)'")

    def __enter__(self) -> Self:
        self._save.loop.check_caller()
        self._settled(self._save.open())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._save.is_ended:
            return
        if error is None:
            self.finalize()
            return
        self._note_failure(error)
        self.discard()

    def save(self, state: Any = None, *, items: Mapping[str, Any] | None = None) -> None:
        """Save one part and return once its snapshot is safe; see `ckpt.types.PartialSave.save`."""
        self._save.loop.check_caller()
        part = self._save.check_part(state, items)
        self._settled(self._save.open())
        self._settled(self._save.add(part))

    def finalize(self) -> StepInfo:
        """Publish the step and return its `StepInfo`; see `ckpt.types.PartialSave.finalize`."""
        self._save.loop.check_caller()
        problem = self._save.finish()
        if problem is not None:
            self._cancelled()
            raise problem
        try:
            self._info = self._save.commit.result()
        except CheckpointError:
            raise
        except BaseException:
            self._cancelled()
            raise
        assert self._info is not None
        return self._info

    def discard(self) -> None:
        """Remove everything that was saved; see `ckpt.types.PartialSave.discard`."""
        self._save.loop.check_caller()
        self._save.discard()
        settled_here(self._save.ended)

    def _settled(self, future: Future[None]) -> None:
        try:
            settled_here(future)
        except BaseException:
            self._cancelled()
            raise
        outcome(future)

    def _cancelled(self) -> None:
        self._save.cancel()
        settled_here(self._save.ended)
