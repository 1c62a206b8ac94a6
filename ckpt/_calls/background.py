"""`BackgroundSaves`: one-shot saves that go on after their call, in one engine of the process."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ckpt._arguments import instance_of
from ckpt._commit import Commit
from ckpt._engine.engine import Engine
from ckpt._engine.plan_cache import PlanCache
from ckpt._engine.save.save_request import SaveRequest
from ckpt._events import Observer
from ckpt._interop.orbax.sidecars import OrbaxSidecars
from ckpt._plan.save_plan import Formats, compile_formats
from ckpt._redaction import redact
from ckpt._runtime.loop import EngineLoop, Job
from ckpt._runtime.threads import run_at_exit
from ckpt._settings import Staging, StagingMode, Timeouts
from ckpt._steps.saves.commits import Backlog, OpenCommits, SaveRun
from ckpt._steps.saves.one_shot import finished, save_one_shot
from ckpt._steps.service import checked_observers, extend, make_engine, make_job
from ckpt.errors import InvalidArgumentError
from ckpt.handlers._registry import HandlersLike, find_handlers
from ckpt.storage._base import Storage
from ckpt.storage._resolve import PathLike, open_step_dir

if TYPE_CHECKING:
    from ckpt._job.solo import ProcessJob
    from ckpt.coordination._base import Coordinator
    from ckpt.extensions._interface import Extensions

logger = logging.getLogger("ckpt")

_GUARD = threading.Lock()
# The saves by process id: a forked child has no thread of its parent.
_OF_PROCESS: dict[int, BackgroundSaves] = {}


class BackgroundSaves:
    """The one-shot saves of a process that are under way; interpreter exit finishes them.

    They share one thread and staging memory that stays warm. They follow one another like the saves
    of a manager with `backlog="wait"`.
    """

    def __init__(self) -> None:
        self.loop = EngineLoop()
        self._engine = make_engine(Staging(), (), sidecars=OrbaxSidecars(one_shot=True))
        self._exit_seconds = Timeouts().exit
        # Set on the engine's loop.
        self._backlog: Backlog | None = None
        self._commits = OpenCommits()
        run_at_exit(self.finish_at_exit)

    def start(
        self,
        path: PathLike,
        request: SaveRequest,
        staging: Staging | StagingMode | None,
        handlers: HandlersLike,
        formats: Formats | None,
        timeouts: Timeouts | None,
        coordinator: Coordinator | None,
        extensions: Extensions,
        observers: Iterable[Observer],
    ) -> tuple[Commit, Job[None], Future[None]]:
        """Start a save; returns the same as `SaveQueue.start`."""
        if staging is not None:
            raise InvalidArgumentError(
                "staging= goes with durable=True: saves in the background share one staging memory"
            )
        storage, step_dir = open_step_dir(path)
        request = replace(request, step_dir=step_dir)
        timeouts = instance_of("timeouts", timeouts, Timeouts) or Timeouts()
        rules = compile_formats(formats)
        engine = replace(self._engine, observers=checked_observers(observers))
        extend(engine, extensions)
        if handlers or rules is not None:
            engine = replace(engine, handlers=find_handlers(handlers), plans=PlanCache(rules))
        location = f"{storage.location}/{step_dir}"
        job = make_job(coordinator, timeouts, location, engine)
        run = SaveRun(request, self.loop, self._commits)
        return run.submit(location, self._save, storage, engine, job, run)

    async def _save(
        self,
        storage: Storage,
        engine: Engine,
        job: ProcessJob,
        run: SaveRun,
    ) -> None:
        # Earlier saves have commits of their own, and their errors are nothing to this call.
        backlog = self._backlog = self._backlog or Backlog("wait")
        backlog.join(run)
        request, hooks = run.request, run.hooks
        logger.debug("saving %s/%s", redact(storage.location), request.step_dir)

        async def admitted() -> None:
            with run.recorder.phase("wait"):
                await backlog.admitted(run)
            hooks.watch.add("waited", hooks.watch.began)

        try:
            async with run.ending(engine.observers):
                manifest = await save_one_shot(
                    engine,
                    storage,
                    request,
                    job.one_shot(request.step_dir),
                    hooks,
                    admitted=admitted,
                    on_snapshot=run.snapshot_taken,
                    on_staged=partial(backlog.staged, run),
                    may_write=partial(backlog.first, run),
                )
        finally:
            backlog.leave(run)
        if run.commit.done():
            return
        with run.reporting(storage.location):
            info = finished(storage, request, manifest, hooks)
            run.recorder.end(run.began_ns, "ok", nbytes=info.nbytes)
            hooks.finish(info)
        # This work uses the pause before the next save; nothing waits for it.
        await engine.arena.warm(lambda: backlog.is_empty and not self.loop.closed)

    def _close(self, seconds: float) -> bool:
        self.loop.stop()
        return self.loop.close(seconds)

    def finish_at_exit(self) -> None:
        """Finish saves under way at interpreter exit; see `OpenCommits.finish_at_exit`."""
        if not self.loop.is_forked:
            self._commits.finish_at_exit(self._close, self._exit_seconds)


def background_saves() -> BackgroundSaves:
    with _GUARD:
        found = _OF_PROCESS.get(os.getpid())
        if found is None:
            found = _OF_PROCESS[os.getpid()] = BackgroundSaves()
        return found
