"""Saves in parts as users see them: one class for asyncio and trio, one for plain code."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

import anyio

from ckpt._commit import StepInfo
from ckpt._runtime.futures import settled, settled_here
from ckpt._steps.saves.partial import OpenSave
from ckpt.errors import CheckpointError

__all__ = ["PartialSave", "SyncPartialSave"]

# Why a save ended whose owner forgot it.
_DROPPED = "it was dropped without finalize() or discard()"


class PartialSave:
    """One step that is saved in several calls; made by `CheckpointManager.partial`.

    Use it as `async with`: leaving the block publishes the step, which is durable then, and an
    exception in the block discards all of it. Without the block, call `finalize` or `discard`.

    It is all or nothing: until it is finalized nobody sees anything of it, and when a part cannot
    be saved, or the call that saves it is cancelled, everything is discarded. Only a part that is
    refused with an `InvalidArgumentError` for its arguments alone changes nothing.
    """

    def __init__(self, save: OpenSave, owner: object = None) -> None:
        """Made by a manager, which is kept alive as the `owner`."""
        self._save = save
        self._owner = owner
        self._info: StepInfo | None = None
        weakref.finalize(self, save.give_up, _DROPPED).atexit = False

    @property
    def step(self) -> int | None:
        """The step."""
        return self._save.request.step

    @property
    def info(self) -> StepInfo | None:
        """The `StepInfo` of the step once it is published; None until then."""
        return self._info

    def __repr__(self) -> str:
        return repr(self._save)

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
        _add_failure(error, self._save)
        await self.discard()

    async def save(self, state: Any = None, *, items: Mapping[str, Any] | None = None) -> None:
        """Save one part: return once its snapshot is safe, and write it in the background.

        From the moment this returns, the caller may donate, delete or change everything it passed.
        Staging memory is shared with all other saves of the manager and stays within its budget:
        where there is no room, this waits until earlier parts are written.

        Args:
            state: A part of the one tree that the step is: dicts are merged, at any depth, with
                those of earlier parts, and keys may only be added.
            items: Or named items, or parts of them, if those are trees of dicts. A step has either
                unnamed parts or named items, not both.

        Raises:
            InvalidArgumentError: An argument cannot be meant as given; or there is something
                already at a path of this part, which names it, and all is discarded.
            UnsupportedLeafError: A leaf cannot be stored; names its path. All is discarded.
            StepExistsError: The step exists; raised by the first call outside a block.
            ClosedError: It was finalized or discarded before.
            CheckpointError: An earlier part could not be written. All is discarded.

        Cancellation: all is discarded before the cancellation goes on.
        """
        part = self._save.check_part(state, items)
        await self._settled(self._save.open())
        await self._settled(self._save.add(part))

    async def finalize(self) -> StepInfo:
        """Wait until all parts are durable, publish the step, and return what it is.

        Raises:
            InvalidArgumentError: There was no part.
            ClosedError: It was finalized or discarded before.
            CheckpointError: A part could not be written, or the step not be published. All is
                discarded.

        Cancellation: all is discarded before the cancellation goes on, unless publishing had begun:
        then the step is whole.
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
        """Give it up; nothing of it is left on return. Does nothing if it is discarded already.

        Raises:
            ClosedError: It was finalized.
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
        future.result()

    async def _cancelled(self) -> None:
        self._save.cancel()
        with anyio.CancelScope(shield=True):
            await settled(self._save.ended)


class SyncPartialSave:
    """One step that is saved in several calls, for plain code; see `ckpt.PartialSave`.

    Use it as `with`. An interrupt of a call that waits discards everything.
    """

    def __init__(self, save: OpenSave, owner: object = None) -> None:
        """Made by a manager, which is kept alive as the `owner`."""
        self._save = save
        self._owner = owner
        self._info: StepInfo | None = None
        weakref.finalize(self, save.give_up, _DROPPED).atexit = False

    @property
    def step(self) -> int | None:
        """The step."""
        return self._save.request.step

    @property
    def info(self) -> StepInfo | None:
        """The `StepInfo` of the step once it is published; None until then."""
        return self._info

    def __repr__(self) -> str:
        return repr(self._save)

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
        _add_failure(error, self._save)
        self.discard()

    def save(self, state: Any = None, *, items: Mapping[str, Any] | None = None) -> None:
        """Save one part and return once its snapshot is safe; see `ckpt.PartialSave.save`."""
        self._save.loop.check_caller()
        part = self._save.check_part(state, items)
        self._settled(self._save.open())
        self._settled(self._save.add(part))

    def finalize(self) -> StepInfo:
        """Publish the step and return what it is; see `ckpt.PartialSave.finalize`."""
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
        """Give it up; nothing of it is left on return. See `ckpt.PartialSave.discard`."""
        self._save.loop.check_caller()
        self._save.discard()
        settled_here(self._save.ended)

    def _settled(self, future: Future[None]) -> None:
        try:
            settled_here(future)
        except BaseException:
            self._cancelled()
            raise
        future.result()

    def _cancelled(self) -> None:
        self._save.cancel()
        settled_here(self._save.ended)


def _add_failure(error: BaseException, save: OpenSave) -> None:
    """Tell of a failure that nobody may have heard of, beside the error that is on its way."""
    failure = save.failure()
    if failure is not None and failure is not error:
        error.add_note(f"the partial save of step {save.request.step} had failed: {failure}")
