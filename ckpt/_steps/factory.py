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
from ckpt._plan.format_rules import Formats, compile_formats
from ckpt._settings import Staging, Timeouts
from ckpt.coordination._base import Coordinator, KeyValues
from ckpt.coordination._jobs import default_coordinator
from ckpt.coordination._peers import Peers
from ckpt.errors import InvalidArgumentError
from ckpt.handlers._registry import HandlersLike, find_handlers

if TYPE_CHECKING:
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


def make_peers(
    coordinator: Coordinator | None, timeouts: Timeouts, location: str, engine: Engine
) -> Peers | None:
    """Return the processes of the job that `coordinator` describes; None for a single process.

    Without a coordinator, it is the job of `jax.distributed`.
    """
    job = job_of(coordinator)
    if job.process_count == 1:
        return None
    return Peers(job, timeouts.coordination, location, engine.arena.capacity)


def job_of(coordinator: Coordinator | None) -> Coordinator:
    """Return the checked `coordinator`, or that of `jax.distributed` if it is None."""
    if coordinator is None:
        return default_coordinator()
    given: object = coordinator
    # A class has the methods of its instances: refuse it by name.
    if isinstance(given, type) or not isinstance(given, Coordinator):
        what = (
            "a Coordinator such as ckpt.coordination.SingleProcess(), or None for the job of "
            "jax.distributed"
        )
        raise invalid("coordinator", given, what + _instead_of_class(given))
    count: object = coordinator.process_count
    if type(count) is not int or count < 1:
        raise invalid("coordinator.process_count", count, "a whole number, 1 or more")
    index: object = coordinator.process_index
    if type(index) is not int or not 0 <= index < count:
        what = f"a whole number from 0 to {count - 1}, since its process_count is {count}"
        raise invalid("coordinator.process_index", index, what)
    shared: object = coordinator.key_values() if count > 1 else None
    if count > 1 and (isinstance(shared, type) or not isinstance(shared, KeyValues)):
        what = "an object with the methods of ckpt.coordination.KeyValues"
        raise invalid("coordinator.key_values()", shared, what)
    return coordinator


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
                + _instead_of_class(each)
            )
    return tuple(map(GuardedObserver, found))


def _instead_of_class(given: object) -> str:
    return f"; pass an instance, {given.__name__}(...)" if isinstance(given, type) else ""
