"""From the arguments of a manager to the service behind it, and its errors at the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from ckpt.backlog import BacklogPolicy, check_backlog
from ckpt.engine.exits import run_at_exit
from ckpt.engine.loop import EngineLoop
from ckpt.errors import InvalidArgumentError
from ckpt.events import Observer
from ckpt.handlers.registry import HandlersLike
from ckpt.layout.formatting import Formats
from ckpt.policies import (
    Deletion,
    PreservationPolicyLike,
    PreserveAll,
    SavePolicyLike,
    check_preservation,
    check_save_policy,
)
from ckpt.policies.checks import shown
from ckpt.preemption import Preemption
from ckpt.redaction import redact
from ckpt.requests import plain_json
from ckpt.service import RootService, make_engine
from ckpt.settings import Staging, Timeouts
from ckpt.step_names import Standard, StepNames, checked
from ckpt.storage.resolve import PathLike, check_trash, open_root

__all__ = ["make_service", "raise_unseen"]

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
    observers: Iterable[Observer],
    clock: Callable[[], float] | None,
) -> RootService:
    """Return the service behind a manager, asyncio or plain; see `ckpt.CheckpointManager`."""
    timeouts = _checked("timeouts", timeouts, Timeouts) or Timeouts()
    _checked("read_only", read_only, bool)
    _checked("create", create, bool)
    storage = open_root(root, timeouts, create=create, permission_mode=permission_mode)
    if save_policy is not None:
        check_save_policy(save_policy)
    if preservation is not None:
        check_preservation(preservation)
    deletion = _checked("deletion", deletion, Deletion) or Deletion()
    names = checked(Standard() if step_names is None else step_names)
    if deletion.trash is not None:
        check_trash(root, deletion.trash, lambda name: names.step(name) is not None)
    staging = _checked("staging", staging, Staging) or Staging()
    service = RootService(
        EngineLoop(),
        storage,
        make_engine(staging, handlers, _observers(observers), formats, _ns_of(clock)),
        save_policy=save_policy,
        preservation=PreserveAll() if preservation is None else preservation,
        deletion=deletion,
        names=names,
        metadata=_plain(metadata),
        backlog=check_backlog(backlog),
        read_only=read_only,
        timeouts=timeouts,
        preemption=Preemption(preemption_signals),
    )
    run_at_exit(service.finish_at_exit)
    return service


def _ns_of(clock: Callable[[], float] | None) -> Callable[[], int]:
    if clock is None:
        return time.time_ns
    given: object = clock
    if not callable(given):
        raise InvalidArgumentError(
            f"clock={clock!r:.80}: expected a function that returns Unix seconds, such as time.time"
        )
    return lambda: int(clock() * 1e9)


def _checked(name: str, value: T | None, wanted: type[T]) -> T | None:
    """Return `value` if it is of the type wanted, or None."""
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
