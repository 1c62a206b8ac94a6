"""The engine and the processes behind a manager or a one-shot call, made from their arguments."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from ckpt._arguments import invalid, shown
from ckpt._engine.engine import Engine
from ckpt._engine.memory.arena import Arena
from ckpt._engine.memory.buffers import Buffers
from ckpt._engine.plan_cache import PlanCache
from ckpt._events import GuardedObserver, Observer
from ckpt._plan.format_rules import Formats, compile_formats
from ckpt._plan.unchanged.frozen_leaves import frozen_patterns
from ckpt._settings import Staging, Timeouts, VitalSignsMode, check_vital_signs
from ckpt.coordination._base import Coordinator, KeyValues
from ckpt.coordination._jobs import default_coordinator
from ckpt.coordination._peers import Peers
from ckpt.errors import InvalidArgumentError
from ckpt.handlers._registry import HandlersLike, find_handlers


def make_engine(
    staging: Staging,
    handlers: HandlersLike,
    observers: Iterable[Observer] = (),
    formats: Formats | None = None,
    clock: Callable[[], float] | None = None,
    *,
    vital_signs: VitalSignsMode = False,
    frozen: str | Sequence[str] = (),
) -> Engine:
    """Return an engine with a cold arena; the given handlers come before the built-in ones."""
    check_vital_signs(vital_signs)
    patterns = frozen_patterns(frozen)
    if patterns and vital_signs in (False, "host"):
        raise InvalidArgumentError(
            "frozen=: devices prove by vital signs that leaves have not changed: pass "
            "vital_signs=True, too, or leave frozen= out"
        )
    arena = Arena(staging.effective_budget)
    return Engine(
        staging,
        find_handlers(handlers),
        checked_observers(observers),
        arena,
        Buffers(arena),
        PlanCache(compile_formats(formats)),
        vital_signs,
        _now_ns_of(clock),
        frozen=patterns,
    )


def make_peers(
    coordinator: Coordinator | None, timeouts: Timeouts, location: str, engine: Engine
) -> Peers | None:
    """Return the processes of the job that `coordinator` describes, or None if this one is alone.

    Without a coordinator it is the job of `jax.distributed`.
    """
    job = job_of(coordinator)
    if job.process_count == 1:
        return None
    return Peers(job, timeouts.coordination, location, engine.arena.capacity)


def job_of(coordinator: Coordinator | None) -> Coordinator:
    """Return `coordinator` after a check of it, or that of `jax.distributed` if it is None."""
    if coordinator is None:
        return default_coordinator()
    given: object = coordinator
    # A class has the methods, too.
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
    """Return observers whose errors do no harm.

    Raises:
        InvalidArgumentError: They are no functions.
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


def _now_ns_of(clock: Callable[[], float] | None) -> Callable[[], int]:
    if clock is None:
        return time.time_ns
    given: object = clock
    if not callable(given):
        raise invalid("clock", clock, "a function that returns Unix seconds, such as time.time")
    return lambda: int(clock() * 1e9)
