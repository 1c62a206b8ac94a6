"""From the arguments of a manager to the service behind it, and its errors at the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from ckpt._arguments import plain_json, shown
from ckpt._engine.engine import Engine
from ckpt._events import Observer
from ckpt._plan.format_rules import Formats
from ckpt._redaction import redact
from ckpt._runtime.exit import run_at_exit
from ckpt._runtime.loop import EngineLoop
from ckpt._settings import Staging, Timeouts
from ckpt._steps.saves.backlog import BacklogPolicy, check_backlog
from ckpt._steps.saves.preemption import Preemption
from ckpt._steps.service import RootService, make_engine
from ckpt.coordination._base import Coordinator, KeyValues
from ckpt.coordination._default import default_coordinator
from ckpt.coordination._peers import Peers
from ckpt.errors import InvalidArgumentError
from ckpt.handlers._registry import HandlersLike
from ckpt.policies import (
    Deletion,
    PreservationPolicyLike,
    PreserveAll,
    SavePolicyLike,
    check_preservation,
    check_save_policy,
)
from ckpt.step_names import Standard, StepNames, checked
from ckpt.storage._resolve import PathLike, check_trash, open_root

__all__ = ["checked_type", "job_of", "make_peers", "make_service", "raise_unseen"]

logger = logging.getLogger("ckpt")

T = TypeVar("T")


def make_service(
    root: PathLike,
    *,
    save_policy: SavePolicyLike | None,
    preservation: PreservationPolicyLike | None,
    deletion: Deletion | None,
    step_names: StepNames | None,
    metadata: Mapping[str, Any] | None,
    handlers: HandlersLike,
    staging: Staging | None,
    formats: Formats | None,
    backlog: BacklogPolicy,
    read_only: bool,
    create: bool,
    permission_mode: int | None,
    preemption_signals: Iterable[int],
    timeouts: Timeouts | None,
    coordinator: Coordinator | None,
    observers: Iterable[Observer],
    clock: Callable[[], float] | None,
) -> RootService:
    """Return the service behind a manager, asyncio or plain; see `ckpt.CheckpointManager`."""
    timeouts = checked_type("timeouts", timeouts, Timeouts) or Timeouts()
    checked_type("read_only", read_only, bool)
    checked_type("create", create, bool)
    storage = open_root(root, timeouts, create=create, permission_mode=permission_mode)
    if save_policy is not None:
        check_save_policy(save_policy)
    if preservation is not None:
        check_preservation(preservation)
    deletion = checked_type("deletion", deletion, Deletion) or Deletion()
    names = checked(Standard() if step_names is None else step_names)
    if deletion.trash is not None:
        check_trash(root, deletion.trash, lambda name: names.step(name) is not None)
    staging = checked_type("staging", staging, Staging) or Staging()
    engine = make_engine(staging, handlers, _observers(observers), formats, _ns_of(clock))
    peers = make_peers(coordinator, timeouts, storage.location, engine)
    if backlog == "supersede" and not peers.is_alone:
        raise InvalidArgumentError(
            f"backlog='supersede': this job has {peers.count} processes, which would not give up "
            "the same save; use 'wait' or 'skip'"
        )
    service = RootService(
        EngineLoop(),
        storage,
        engine,
        save_policy=save_policy,
        preservation=PreserveAll() if preservation is None else preservation,
        deletion=deletion,
        names=names,
        metadata=_plain(metadata),
        backlog=check_backlog(backlog),
        read_only=read_only,
        timeouts=timeouts,
        preemption=Preemption(preemption_signals),
        peers=peers,
    )
    run_at_exit(service.finish_at_exit)
    return service


def make_peers(
    coordinator: Coordinator | None, timeouts: Timeouts, location: str, engine: Engine
) -> Peers:
    """Return the processes of the job that `coordinator` knows; None finds those of jax."""
    return Peers(job_of(coordinator), timeouts.coordination, location, engine.arena.capacity)


def job_of(coordinator: Coordinator | None) -> Coordinator:
    """Return the job that a call takes part in: that of `coordinator`, or of jax."""
    if coordinator is None:
        return default_coordinator()
    given: object = coordinator
    # A class has the methods, too.
    if isinstance(given, type) or not isinstance(given, Coordinator):
        raise InvalidArgumentError(
            f"coordinator={given!r:.80}: expected a Coordinator such as "
            "ckpt.coordination.SingleProcess(), or None for the job of jax.distributed"
            + ("; make one of that class" if isinstance(given, type) else "")
        )
    count: object = coordinator.process_count
    if type(count) is not int or count < 1:
        raise InvalidArgumentError(
            f"coordinator: its process_count is {count!r:.80}: expected a whole number, 1 or more"
        )
    index: object = coordinator.process_index
    if type(index) is not int or not 0 <= index < count:
        raise InvalidArgumentError(
            f"coordinator: its process_index is {index!r:.80}: expected a whole number from 0 to "
            f"{count - 1}, since its process_count is {count}"
        )
    shared: object = coordinator.key_values() if count > 1 else None
    if count > 1 and (isinstance(shared, type) or not isinstance(shared, KeyValues)):
        raise InvalidArgumentError(
            f"coordinator: its key_values() gives {shared!r:.80}: expected an object with the "
            "methods of ckpt.coordination.KeyValues"
        )
    return coordinator


def _ns_of(clock: Callable[[], float] | None) -> Callable[[], int]:
    if clock is None:
        return time.time_ns
    given: object = clock
    if not callable(given):
        raise InvalidArgumentError(
            f"clock={clock!r:.80}: expected a function that returns Unix seconds, such as time.time"
        )
    return lambda: int(clock() * 1e9)


def checked_type(name: str, value: T | None, wanted: type[T]) -> T | None:
    """Return `value` if it is of the type wanted, or None.

    Raises:
        InvalidArgumentError: It is neither.
    """
    given: object = value
    if given is not None and not isinstance(given, wanted):
        raise InvalidArgumentError(
            f"{name}={given!r:.80}: expected a {wanted.__name__}, not {type(given).__name__}"
        )
    return value


def _observers(observers: object) -> list[Observer]:
    if not isinstance(observers, Iterable) or callable(observers):
        raise InvalidArgumentError(
            f"observers={observers!r:.80}: expected a list of functions of an Event, such as "
            "[ckpt.observers.Trace()]"
        )
    found = list(observers)
    for each in found:
        if not callable(each) or isinstance(each, type):
            raise InvalidArgumentError(
                f"observers: {each!r:.80} is no function of an Event"
                + ("; make one of that class" if isinstance(each, type) else "")
            )
    return found


def _plain(metadata: object) -> dict[str, Any] | None:
    """Return the metadata of a root as plain JSON values."""
    if metadata is None:
        return None
    if not isinstance(metadata, Mapping):
        raise InvalidArgumentError(
            f"metadata={shown(metadata, 120)}: expected a mapping of names to JSON values"
        )
    plain: dict[str, Any] = plain_json(dict(metadata))
    return plain


def raise_unseen(service: RootService, error: BaseException | None) -> None:
    """Raise what nobody has fetched; where `error` is on its way already, add it as notes."""
    unseen = service.saves.take_errors()
    if error is not None:
        for each in unseen:
            logger.error("a save failed: %s", each)
            where = redact(service.storage.location)
            error.add_note(f"a save to {where} failed as well: {each}")
    elif len(unseen) == 1:
        raise unseen[0]
    elif unseen:
        raise BaseExceptionGroup(f"{len(unseen)} saves failed", unseen)
