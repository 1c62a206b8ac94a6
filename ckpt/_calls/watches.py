"""The engine's loop of one watch; both kinds of iterators use it."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

from ckpt._arguments import instance_of
from ckpt._runtime.loop import EngineLoop, Job
from ckpt._runtime.threads import run_at_exit
from ckpt._settings import Timeouts
from ckpt._steps.watcher import Watcher, WatchOptions
from ckpt.errors import CommitCancelledError, InvalidArgumentError
from ckpt.step_names import Standard, StepNames, checked
from ckpt.storage._resolve import PathLike, open_root

_EXIT_SECONDS = 5.0


def watcher_of(
    root: PathLike, step_names: StepNames | None, timeouts: Timeouts | None, *options: Any
) -> Watcher:
    """Return the watcher for either kind of iterator; the options are those of `WatchOptions`."""
    timeouts = instance_of("timeouts", timeouts, Timeouts) or Timeouts()
    names = Standard() if step_names is None else checked(step_names)
    return Watcher(open_root(root, timeouts, create=False), names, WatchOptions(*options))


class Watching:
    """The engine's loop of one watch, its jobs, and their end.

    This is a separate object, so that its jobs do not keep the iterator alive, which users may
    drop.
    """

    def __init__(self, watcher: Watcher) -> None:
        self.loop = EngineLoop()
        self.watcher = watcher
        self.jobs: list[Job[None]] = []
        self.is_waiting = False
        self.is_ended = False

    def begin(self) -> None:
        if self.is_waiting:
            raise InvalidArgumentError("another call is waiting for the next step of this watch")
        if not self.jobs:
            self.jobs.append(self.loop.submit(self._keep))
        self.is_waiting = True

    async def _keep(self) -> None:
        # This is a method, so that the job keeps this object, and with it the hook at exit, until
        # the lease is dropped, even after the iterator is gone.
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
        """Drop the lease at interpreter exit, within a few seconds."""
        self.stop()
        self.loop.close(_EXIT_SECONDS)


class WatchBase:
    """The construction and the end at exit that both iterators share."""

    def __init__(self, watcher: Watcher) -> None:
        """Called by `watch` only."""
        self._face = Watching(watcher)
        weakref.finalize(self, self._face.stop).atexit = False
        run_at_exit(self._face.finish_at_exit)
