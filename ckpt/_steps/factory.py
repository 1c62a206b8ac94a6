"""Make the engine and the processes of a manager or a one-shot call from the arguments."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ckpt._arguments import invalid, shown
from ckpt._engine.engine import Engine
from ckpt._engine.memory.arena import Arena
from ckpt._engine.memory.buffers import Buffers
from ckpt._engine.plan_cache import PlanCache
from ckpt._events import GuardedObserver, Observer
from ckpt._job.solo_job import SoloJob
from ckpt._plan.format_rules import Formats, compile_formats
from ckpt._runtime.jax_internals import job_size
from ckpt._settings import Staging, Timeouts
from ckpt.errors import InvalidArgumentError
from ckpt.handlers._registry import HandlersLike, find_handlers

if TYPE_CHECKING:
    from ckpt._job.solo_job import ProcessJob
    from ckpt.coordination._base import Coordinator
    from ckpt.extensions import Extensions

# Engines take their clock from here when they are made; `ckpt.testing.clock` sets another one.
wall_clock_ns: Callable[[], int] = time.time_ns


def make_engine(
    staging: Staging,
    handlers: HandlersLike,
    observers: Iterable[Observer] = (),
    formats: Formats | None = None,
    extensions: Extensions = (),
) -> Engine:
    """Return an engine with a cold arena; the given handlers come before the built-in ones."""
    arena = Arena(staging.effective_budget)
    engine = Engine(
        staging,
        find_handlers(handlers),
        checked_observers(observers),
        arena,
        Buffers(arena),
        PlanCache(compile_formats(formats)),
        now_ns=wall_clock_ns,
    )
    extend(engine, extensions)
    return engine


def extend(engine: Engine, extensions: Extensions) -> None:
    """Let an engine take what the extensions ask for."""
    if extensions in ((), []):
        return
    from ckpt.extensions import open_extensions

    engine.extensions = open_extensions(extensions, engine.extension_states)


def make_job(
    coordinator: Coordinator | None, timeouts: Timeouts, location: str, engine: Engine
) -> ProcessJob:
    """Return the part that this process takes in the job that `coordinator` describes.

    Without a coordinator, it is the job of `jax.distributed`. A process that is alone imports
    nothing of jobs.
    """
    job = _several(coordinator)
    if job is None:
        return SoloJob(engine.arena.capacity)
    from ckpt._job.agreement.peers import Peers
    from ckpt._job.processes import MultihostJob

    return MultihostJob(Peers(job, timeouts.coordination, location, engine.arena.capacity))


def place_in_job(coordinator: Coordinator | None) -> tuple[int, int]:
    """Return the number of this process in its job, and the number of processes."""
    job = _several(coordinator)
    return (0, 1) if job is None else (job.process_index, job.process_count)


def _several(coordinator: Coordinator | None) -> Coordinator | None:
    """Return the job that this process shares with others; None if it is alone."""
    if coordinator is None and job_size() == 1:
        return None
    from ckpt.coordination._jobs import job_of

    job = job_of(coordinator)
    return None if job.process_count == 1 else job


def checked_observers(observers: object) -> tuple[Observer, ...]:
    """Return the observers, wrapped so that their errors do no harm.

    Raises:
        InvalidArgumentError: An element is no function.
    """
    if not isinstance(observers, Iterable) or callable(observers):
        what = "a list of functions of an Event, such as [ckpt.observers.Trace()]"
        raise invalid("observers", observers, what)
    found = tuple(observers)
    for each in found:
        if not callable(each) or isinstance(each, type):
            raise InvalidArgumentError(
                f"observers: expected functions of an Event, not {shown(each)}"
                + (f"; pass an instance, {each.__name__}(...)" if isinstance(each, type) else "")
            )
    return tuple(map(GuardedObserver, found))
