"""`watch`: new steps of a root, for `async for` and for `for`. What is done is in `watcher`."""

from __future__ import annotations

import contextlib
import inspect
import math
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Self

import anyio

from ckpt._arguments import check_bool, shown
from ckpt._commit import StepInfo
from ckpt._runtime.exit import run_at_exit
from ckpt._runtime.loop import EngineLoop, Job
from ckpt._settings import Timeouts
from ckpt._steps.watcher import Watcher, WatchOptions
from ckpt.errors import CommitCancelledError, InvalidArgumentError
from ckpt.step_names import Standard, StepNames, checked
from ckpt.storage._manifests import check_step
from ckpt.storage._resolve import PathLike, open_root

__all__ = ["SyncWatch", "Until", "Watch", "watch", "watch_sync"]

_EXIT_SECONDS = 5.0
_LONGEST_SECONDS = 365 * 86400.0

Until = int | Callable[[], object] | None


class _WatchBase:
    """What both kinds of watch have in common: the loop, its jobs, and their end."""

    def __init__(self, watcher: Watcher) -> None:
        self.loop = EngineLoop()
        self.watcher = watcher
        self.jobs: list[Job[None]] = []
        self.is_waiting = False
        self.is_ended = False

    def begin(self) -> None:
        """Begin to wait for the next step."""
        if self.is_waiting:
            raise InvalidArgumentError("somebody waits for the next step of this watch already")
        if not self.jobs:
            self.jobs.append(self.loop.submit(self._keep))
        self.is_waiting = True

    async def _keep(self) -> None:
        # It holds this object until the lease is dropped, also when the iterator has gone: who is
        # called at exit must be there.
        await self.watcher.keep()

    def stop(self) -> None:
        """Let go of everything soon; does not wait."""
        self.is_ended = True
        if not self.loop.is_forked:
            for job in self.jobs:
                job.cancel()
            self.loop.stop()

    def raise_failure(self) -> None:
        """Raise the error that has ended the watch, if there was one; the loop is closed."""
        for job in self.jobs:
            with contextlib.suppress(CommitCancelledError):
                job.future.result(0)

    def finish_at_exit(self) -> None:
        """At interpreter exit: leave no lease behind if that is quick."""
        self.stop()
        self.loop.close(_EXIT_SECONDS)


class Watch:
    """New steps of a root, for `async for`; made by `ckpt.watch`.

    The step in hand is let go when the next one is asked for, at `aclose`, at the end of an
    `async with` block, or when nobody refers to this object any more.
    """

    def __init__(self, watcher: Watcher) -> None:
        """Made by `watch`."""
        self._face = _WatchBase(watcher)
        weakref.finalize(self, self._face.stop).atexit = False
        run_at_exit(self._face.finish_at_exit)

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
            # It may have come between the step and the caller, who never saw it.
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
        """Let go of the step in hand, and end; who waits for a step gets none. Idempotent."""
        self._face.stop()
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._face.loop.close)


class SyncWatch:
    """New steps of a root, for `for`; made by `ckpt.sync.watch`. See `Watch`."""

    def __init__(self, watcher: Watcher) -> None:
        """Made by `watch_sync`."""
        self._face = _WatchBase(watcher)
        weakref.finalize(self, self._face.stop).atexit = False
        run_at_exit(self._face.finish_at_exit)

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
            # An interrupt may have come between the step and the caller, who never saw it.
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
        """Let go of the step in hand, and end; who waits for a step gets none. Idempotent."""
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
    """Return an iterator over the committed steps of a root, those to come included.

    `async for info in ckpt.watch(root)` gives the `StepInfo` of each step once, ascending. A step
    that was overwritten, or deleted and saved again, is a new one; one that was deleted before its
    turn is left out. The root need not exist yet. The step in hand is pinned by a lease, so that no
    manager deletes it; see `Watch` for how long. All work is done on a thread of the library's own,
    which also renews the lease while the caller is busy.

    Args:
        root: What the manager was given: a directory, a URL or a store.
        timeout: Seconds to wait for a new step before the iteration ends; None waits for ever, 0
            gives what is there. A root that cannot be looked at when they are over is an error.
        min_interval: Seconds from one step to the next at least.
        until: A step: the iteration ends after it, or a greater one, was given out. Or a function
            without arguments, called in a thread while there is nothing new, that returns whether
            nothing more is to come. It may not be async.
        after: Only steps greater than this one.
        only_latest: Leave out all new steps but the greatest, where there are several.
        poll_interval: Seconds from one look to the next.
        pin: Whether the step in hand is pinned. Without, nothing is written to the root, and the
            step may be deleted while it is read.
        step_names: As for `CheckpointManager`.
        timeouts: `lease` is how long the pin outlives this process, if that is killed.

    Raises:
        InvalidArgumentError: An argument cannot be meant as given.
        StorageError: While iterating: the root could not be looked at six times in a row, or when
            `timeout` was over, or the lease not be written.
        CorruptCheckpointError: While iterating: the manifest of a step is damaged. Asked again, the
            iterator gives the next step.
        UnsupportedFormatError: While iterating: a step is of a later format. As before.

    Cancellation: nothing stays pinned. A step that the cancelled call would have given is given by
    the next one.
    """
    return Watch(
        _watcher(
            root,
            timeout,
            min_interval,
            until,
            after,
            only_latest,
            poll_interval,
            pin,
            step_names,
            timeouts,
        )
    )


def watch_sync(
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
) -> SyncWatch:
    """Return an iterator over the committed steps of a root, those to come included.

    As `ckpt.watch`, for plain code: `for info in ckpt.sync.watch(root)`. It ends with `close`
    instead of `aclose`. An interrupt (Ctrl-C) while it waits leaves nothing pinned.
    """
    return SyncWatch(
        _watcher(
            root,
            timeout,
            min_interval,
            until,
            after,
            only_latest,
            poll_interval,
            pin,
            step_names,
            timeouts,
        )
    )


def _watcher(
    root: PathLike,
    timeout: float | None,
    min_interval: float,
    until: Until,
    after: int | None,
    only_latest: bool,
    poll_interval: float,
    pin: bool,
    step_names: StepNames | None,
    timeouts: Timeouts | None,
) -> Watcher:
    """Return what is behind a watch, arguments checked."""
    if callable(until):
        _check_function(until)
    elif until is not None:
        until = _step("until", until)
    check_bool("watch", only_latest, name="only_latest")
    check_bool("watch", pin, name="pin")
    timeouts = Timeouts() if timeouts is None else timeouts
    if not isinstance(timeouts, Timeouts):
        raise InvalidArgumentError(
            f"watch(timeouts={shown(timeouts, 80)}): expected a ckpt.Timeouts, such as "
            "Timeouts(lease=60)"
        )
    names = Standard() if step_names is None else checked(step_names)
    poll = _seconds("poll_interval", poll_interval)
    if poll == 0:
        raise InvalidArgumentError("watch(poll_interval=0): expected a number above 0")
    wishes = WatchOptions(
        timeout=math.inf if timeout is None else _seconds("timeout", timeout),
        min_interval=_seconds("min_interval", min_interval),
        until=until if callable(until) else None,
        last=until if isinstance(until, int) else math.inf,
        after=-1 if after is None else _step("after", after),
        only_latest=only_latest,
        poll_interval=poll,
        pin=pin,
    )
    return Watcher(open_root(root, timeouts), names, wishes)


def _check_function(until: Callable[[], object]) -> None:
    """Raise where what `until` returns counts as true, whatever it means."""
    what = None
    if isinstance(until, type):
        what = "a class"
    elif any(map(inspect.iscoroutinefunction, (until, type(until).__call__))):
        what = "async"
    if what is not None:
        raise InvalidArgumentError(
            f"watch(until={shown(until, 80)}): it is {what}; expected a step, or a plain function "
            "without arguments that returns whether nothing more is to come"
        )


def _step(name: str, value: object) -> int:
    try:
        return check_step(value)
    except (InvalidArgumentError, ValueError) as error:
        also = ", or a function without arguments" if name == "until" else ""
        raise InvalidArgumentError(
            f"watch({name}={shown(value, 80)}): expected a step, which is a whole number, 0 or "
            f"greater{also}"
        ) from error


def _seconds(name: str, value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, int | float) and is_number and 0 <= value <= _LONGEST_SECONDS:
        return float(value)
    raise InvalidArgumentError(
        f"watch({name}={shown(value, 80)}): expected a number of seconds from 0 to "
        f"{_LONGEST_SECONDS:.0f}"
    )
