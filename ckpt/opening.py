"""From the arguments of a manager to the service behind it, and its errors at the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

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
from ckpt.preemption import Preemption
from ckpt.redaction import redact
from ckpt.requests import plain_json
from ckpt.service import RootService, make_engine
from ckpt.settings import Staging, Timeouts
from ckpt.step_names import Standard, StepNames, checked
from ckpt.storage.resolve import PathLike, open_root

__all__ = ["make_service", "raise_unseen"]

logger = logging.getLogger("ckpt")


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
    timeouts = timeouts or Timeouts()
    storage = open_root(root, timeouts, create=create, permission_mode=permission_mode)
    if save_policy is not None:
        check_save_policy(save_policy)
    if preservation is not None:
        check_preservation(preservation)
    service = RootService(
        EngineLoop(),
        storage,
        make_engine(staging or Staging(), handlers, observers, formats, _ns_of(clock)),
        save_policy=save_policy,
        preservation=preservation or PreserveAll(),
        deletion=_checked_deletion(deletion),
        names=checked(step_names or Standard()),
        metadata=_plain(metadata),
        backlog=check_backlog(backlog),
        read_only=read_only,
        timeouts=timeouts,
        preemption=Preemption(preemption_signals),
    )
    run_at_exit(service.finish_at_exit)
    return service


def _ns_of(clock: Callable[[], float] | None) -> Callable[[], int]:
    return time.time_ns if clock is None else lambda: int(clock() * 1e9)


def _checked_deletion(deletion: object) -> Deletion:
    if deletion is None:
        return Deletion()
    if not isinstance(deletion, Deletion):
        raise InvalidArgumentError(
            f"deletion={deletion!r:.80}: expected a ckpt.policies.Deletion, such as "
            "Deletion(trash='trash')"
        )
    return deletion


def _plain(metadata: object) -> dict[str, Any] | None:
    """Return the metadata of a root as plain JSON values."""
    if metadata is None:
        return None
    if not isinstance(metadata, Mapping):
        raise InvalidArgumentError(
            f"metadata={metadata!r:.120}: expected a mapping of names to JSON values"
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
