"""`Watch`: an iterator over the committed steps of a root."""

from __future__ import annotations

from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ckpt._api import waits
from ckpt._api.base import refused
from ckpt._calls.watches import WatchBase
from ckpt._commit import StepInfo
from ckpt._runtime.loop import end_loop


class Watch(WatchBase):
    """New steps of a root, for `async for`; made by `ckpt.watch`.

    The current step is released when the next one is asked for, by `aclose`, at the end of an
    `async with` block, or when this object is garbage-collected.

    Example:
        ```python
        async with mgr.watch(until=1000) as steps:
            async for info in steps:
                print(info)
        ```
    """

    if not TYPE_CHECKING:
        __iter__ = refused(
            "use 'async for step in ckpt.watch(...)', or without asyncio 'for step in "
            "ckpt.sync.watch(...)'"
        )
        __enter__ = __exit__ = refused(
            "use 'async with ckpt.watch(...)', or without asyncio 'with ckpt.sync.watch(...)'"
        )

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StepInfo:
        face = self._face
        if face.is_ended:
            raise StopAsyncIteration
        # plain: face.loop.check_caller()
        face.begin()
        try:
            info = await face.loop.run(face.watcher.advance)
        except waits.cancelled():
            # A step may have been found that the caller never got.
            await waits.shielded(partial(face.loop.run, face.watcher.undo_advance))
            raise
        finally:
            face.is_waiting = False
        if info is None:
            await self.aclose()
            face.raise_failure()
            raise StopAsyncIteration
        return info

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Release the current step and end the iteration, even while another call is waiting.

        Example:
            ```python
            steps = mgr.watch()
            async for info in steps:
                print(info)
                await steps.aclose()
            ```
        """
        self._face.stop()
        await end_loop(self._face.loop)
