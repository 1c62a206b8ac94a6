"""`watch`, `Watch` and `SyncWatch`: iterators over the committed steps of a root."""

from __future__ import annotations

import contextlib
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Self

import anyio

from ckpt._api.faces.coroutines import refused
from ckpt._arguments import instance_of
from ckpt._commit import StepInfo
from ckpt._runtime.exit import run_at_exit
from ckpt._runtime.loop import EngineLoop, Job, end_loop
from ckpt._settings import Timeouts
from ckpt._steps.watcher import Until, Watcher, WatchOptions
from ckpt.errors import CommitCancelledError, InvalidArgumentError
from ckpt.step_names import Standard, StepNames, checked
from ckpt.storage._resolve import PathLike, open_root

_EXIT_SECONDS = 5.0


class _Watching:
    """The engine's loop of one watch, its jobs, and their end.

    An object of its own, so that its jobs do not keep the iterator alive that users may drop.
    """

    def __init__(self, watcher: Watcher) -> None:
        self.loop = EngineLoop()
        self.watcher = watcher
        self.jobs: list[Job[None]] = []
        self.is_waiting = False
        self.is_ended = False

    def begin(self) -> None:
        """Begin to wait for the next step."""
        if self.is_waiting:
            raise InvalidArgumentError("another call is waiting for the next step of this watch")
        if not self.jobs:
            self.jobs.append(self.loop.submit(self._keep))
        self.is_waiting = True

    async def _keep(self) -> None:
        # A method, so that the job keeps this object, and with it the hook at exit, until the lease
        # is dropped, even after the iterator is gone.
        await self.watcher.keep()

    def stop(self) -> None:
        """Release everything soon; does not wait."""
        self.is_ended = True
        if not self.loop.is_forked:
            for job in self.jobs:
                job.cancel()
            self.loop.stop()

    def raise_failure(self) -> None:
        """Raise the error that ended the watch, if there was one; the loop is closed."""
        for job in self.jobs:
            with contextlib.suppress(CommitCancelledError):
                job.future.result(0)

    def finish_at_exit(self) -> None:
        """At interpreter exit: drop the lease if that is quick."""
        self.stop()
        self.loop.close(_EXIT_SECONDS)


class _WatchBase:
    """What both iterators share: their construction and the end at exit."""

    def __init__(self, watcher: Watcher) -> None:
        """Called by `watch` only."""
        self._face = _Watching(watcher)
        weakref.finalize(self, self._face.stop).atexit = False
        run_at_exit(self._face.finish_at_exit)


class Watch(_WatchBase):
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
        __enter__ = __exit__ = refused("use 'async with ckpt.watch(...)', or ckpt.sync.watch")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StepInfo:
        face = self._face
        if face.is_ended:
            raise StopAsyncIteration
        face.begin()
        try:
            info = await face.loop.run(face.watcher.advance)
        except anyio.get_cancelled_exc_class():
            # A step may have been found already that the caller never got.
            with anyio.CancelScope(shield=True):
                await face.loop.run(face.watcher.take_back)
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
        """Release the current step and end the iteration, also for a call that is waiting.

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


class SyncWatch(_WatchBase):
    """New steps of a root, for `for`; made by `ckpt.sync.watch`.

    The current step is released when the next one is asked for, by `close`, at the end of a `with`
    block, or when this object is garbage-collected.

    Example:
        ```python
        with ckpt.sync.watch("runs/a", until=1000) as steps:
            for info in steps:
                print(info)
        ```
    """

    if not TYPE_CHECKING:
        __aiter__ = refused(
            "use 'for step in ckpt.sync.watch(...)', or with asyncio 'async for step in "
            "ckpt.watch(...)'"
        )
        __aenter__ = __aexit__ = refused("use 'with ckpt.sync.watch(...)', or ckpt.watch")

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepInfo:
        face = self._face
        if face.is_ended:
            raise StopIteration
        face.loop.check_caller()
        face.begin()
        try:
            info = face.loop.call(face.watcher.advance)
        except BaseException as error:
            # An interrupt: a step may have been found already that the caller never got.
            if not isinstance(error, Exception):
                face.loop.call(face.watcher.take_back)
            raise
        finally:
            face.is_waiting = False
        if info is None:
            self.close()
            face.raise_failure()
            raise StopIteration
        return info

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the current step and end the iteration, also for a call that is waiting.

        Example:
            ```python
            steps = ckpt.sync.watch("runs/a")
            for info in steps:
                print(info)
                steps.close()
            ```
        """
        self._face.stop()
        self._face.loop.close()


def watch(
    root: PathLike,
    *,
    timeout: float | None = None,
    min_interval: float = 0.0,
    until: Until = None,
    after: int | None = None,
    only_latest: bool = False,
    poll_interval: float = 1.0,
    pin: bool = True,
    step_names: StepNames | None = None,
    timeouts: Timeouts | None = None,
) -> Watch:
    """Iterate over the committed steps of a root, including those saved later.

    `async for info in ckpt.watch(root)` gives the `StepInfo` of each step once, in ascending order.
    A step that is overwritten, or deleted and saved again, is a new one; a step that is deleted
    before its turn is left out. The root need not exist yet. The current step is pinned by a lease,
    so that no manager deletes it, until the next one is asked for or the iteration ends. All work
    is done on a thread of the library's own, which also renews the lease while the caller is busy.

    Args:
        root: What the manager was given: a directory, a URL or a store.
        timeout: Seconds to wait for a new step before the iteration ends. None waits forever, 0
            gives only the steps that exist. If the root cannot be read by then, that is an error.
        min_interval: The least seconds between two steps.
        until: When to end: after this step or a greater one that the run did not go back behind; or
            a function without arguments that returns whether no more steps will come. It is called
            in a thread while there is no new step, and may not be async.
        after: Only give steps greater than this one.
        only_latest: If several steps are new, only give the greatest; none that the run went back
            behind.
        poll_interval: Seconds between two looks at the root.
        pin: Whether to pin the current step. Without a pin, nothing is written to the root, and the
            step may be deleted while it is read.
        step_names: How the directories of steps are named (`ckpt.step_names`).
        timeouts: `lease` is how long the pin lasts if this process is killed.

    Returns:
        The iterator.

    Raises:
        InvalidArgumentError: An argument is invalid.
        StorageError: While iterating: the root could not be read six times in a row, or not before
            `timeout`; or the lease could not be written.
        CorruptCheckpointError: While iterating: the manifest of a step is damaged. The next call
            gives the next step.
        UnsupportedFormatError: While iterating: a step has a later format. The next call gives the
            next step.

    Cancellation: nothing stays pinned, and the next call gives the step that the cancelled one
    would have given.

    Example:
        ```python
        async for info in ckpt.watch("runs/a", until=1000):
            params = await ckpt.load(info.path, at="params")
        ```
    """
    options = WatchOptions(timeout, min_interval, until, after, only_latest, poll_interval, pin)
    return Watch(watcher_of(root, options, step_names, timeouts))


def watcher_of(
    root: PathLike, options: WatchOptions, step_names: StepNames | None, timeouts: Timeouts | None
) -> Watcher:
    """Return what finds the steps for either kind of iterator."""
    timeouts = instance_of("timeouts", timeouts, Timeouts) or Timeouts()
    names = Standard() if step_names is None else checked(step_names)
    return Watcher(open_root(root, timeouts, create=False), names, options)
