"""`BackgroundSaves`: one-shot saves that go on after their call, on one engine of the process."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial

from msgspec.structs import replace

from ckpt._arguments import instance_of
from ckpt._commit import Commit, CommitHooks
from ckpt._engine.engine import Engine
from ckpt._engine.plan_cache import PlanCache
from ckpt._engine.save.deadline import given_up_after
from ckpt._engine.save.joint.multihost import JointSave
from ckpt._engine.save.pipeline import save_step
from ckpt._engine.save.request import SaveCall, SaveCalls, SaveRequest
from ckpt._events import EventRecorder, Observer
from ckpt._plan.format_rules import Formats, compile_formats
from ckpt._redaction import redact
from ckpt._runtime.exit import run_at_exit
from ckpt._runtime.loop import EngineLoop, Job
from ckpt._settings import Staging, Timeouts, VitalSignsMode, check_vital_signs
from ckpt._steps.factory import checked_observers, make_engine, make_peers
from ckpt._steps.saves.backlog import Backlog, BacklogSlot
from ckpt._steps.saves.commits import OpenCommits
from ckpt._steps.saves.one_shot import finished, prepared, processes_of
from ckpt._steps.saves.queue import end_badly
from ckpt.coordination._base import Coordinator
from ckpt.coordination._peers import Peers
from ckpt.handlers._registry import HandlersLike, find_handlers
from ckpt.storage._base import Storage
from ckpt.storage._resolve import PathLike, open_step_dir

logger = logging.getLogger("ckpt")

_GUARD = threading.Lock()
# The saves of this process, by its id: a fork does not have the thread.
_OF_PROCESS: dict[int, BackgroundSaves] = {}


class BackgroundSaves:
    """The one-shot saves of a process that are under way; interpreter exit finishes them.

    They share one thread, and staging memory that stays warm, and follow one another as those of a
    manager with `backlog="wait"` do.
    """

    def __init__(self) -> None:
        """Begin without any."""
        self.loop = EngineLoop()
        self._engine = make_engine(Staging(), ())
        self._exit_seconds = Timeouts().exit
        # Made on the engine's loop.
        self._backlog: Backlog | None = None
        self._commits = OpenCommits()
        run_at_exit(self.finish_at_exit)

    def start(
        self,
        path: PathLike,
        request: SaveRequest,
        handlers: HandlersLike,
        formats: Formats | None,
        timeouts: Timeouts | None,
        coordinator: Coordinator | None,
        vital_signs: VitalSignsMode,
        observers: Iterable[Observer],
    ) -> tuple[Commit, Job[None], Future[None]]:
        """Start a save; returns what `SaveQueue.start` does."""
        storage, step_dir = open_step_dir(path)
        request = replace(request, step_dir=step_dir)
        timeouts = instance_of("timeouts", timeouts, Timeouts) or Timeouts()
        rules = compile_formats(formats)
        check_vital_signs(vital_signs)
        engine = replace(
            self._engine, vital_signs=vital_signs, observers=checked_observers(observers)
        )
        if handlers or rules is not None:
            engine = replace(engine, handlers=find_handlers(handlers), plans=PlanCache(rules))
        location = f"{storage.location}/{step_dir}"
        peers = make_peers(coordinator, timeouts, location, engine)
        staged: Future[None] = Future()
        jobs: list[Job[None]] = []
        commit = Commit(None, lambda: jobs[0].cancel(), self.loop.check_caller)
        hooks = CommitHooks(commit)
        self._commits.adopt(hooks, commit, location)
        try:
            job = self.loop.submit(self._save, storage, request, engine, peers, hooks, staged)
        except BaseException:
            self._commits.drop(hooks)
            raise
        jobs.append(job)
        return commit, job, staged

    async def _save(
        self,
        storage: Storage,
        request: SaveRequest,
        engine: Engine,
        peers: Peers | None,
        hooks: CommitHooks,
        staged: Future[None],
    ) -> None:
        backlog = self._backlog = self._backlog or Backlog("wait")
        slot = BacklogSlot(request.step_dir, 0, lambda: None)
        backlog.join(slot)
        recorder, began_ns = EventRecorder("save", None, engine.observers), time.perf_counter_ns()
        logger.debug("saving %s/%s", redact(storage.location), request.step_dir)
        try:
            processes: JointSave = processes_of(peers, engine, request.step_dir)
            async with processes.taking_part():
                async with processes.busy():
                    with given_up_after(request.deadline, hooks):
                        with recorder.phase("wait"):
                            await backlog.admitted(slot)
                        hooks.watch.add_wait(hooks.watch.elapsed)
                        whole = await prepared(storage, request, processes)
                call = SaveCall(
                    whole.items,
                    whole.unnamed,
                    on_safe=partial(staged.set_result, None),
                    on_staged=partial(backlog.staged, slot),
                    began=hooks.watch.began,
                )
                manifest = await save_step(
                    engine,
                    storage,
                    whole,
                    hooks,
                    SaveCalls.of(call),
                    processes,
                    may_write=partial(backlog.first, slot),
                )
        except BaseException as error:
            recorder.end_badly(began_ns, error)
            end_badly(error, request, self._commits, hooks, staged)
            if not isinstance(error, Exception):
                raise
            return
        finally:
            backlog.leave(slot)
        self._commits.drop(hooks)
        info = finished(storage, whole, manifest, hooks)
        recorder.end(began_ns, "ok", nbytes=info.nbytes)
        hooks.finish(info)
        # In the pause before the next save; nothing waits for it.
        await engine.arena.warm(lambda: backlog.is_empty and not self.loop.closed)

    def _close(self, seconds: float) -> bool:
        self.loop.stop()
        return self.loop.close(seconds)

    def finish_at_exit(self) -> None:
        """At interpreter exit: finish what is under way; see `OpenCommits.finish_at_exit`."""
        if not self.loop.is_forked:
            self._commits.finish_at_exit(self._close, self._exit_seconds)


def background_saves() -> BackgroundSaves:
    """Return the background saves of this process."""
    with _GUARD:
        found = _OF_PROCESS.get(os.getpid())
        if found is None:
            found = _OF_PROCESS[os.getpid()] = BackgroundSaves()
        return found
