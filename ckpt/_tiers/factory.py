"""From the `tiers` of a manager to the service of its run."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from ckpt._arguments import invalid
from ckpt._engine.engine import Engine
from ckpt._runtime.loop import EngineLoop
from ckpt._settings import Timeouts
from ckpt._steps.saves.preemption import Preemption
from ckpt._steps.service import RootService
from ckpt._tiers.keeper.messages import place_to_json
from ckpt._tiers.memory import MemoryTier
from ckpt._tiers.service import TieredService
from ckpt._tiers.settings import SharedMemory
from ckpt._tiers.shared_folder import SharedFolder, folder_of
from ckpt.errors import InvalidArgumentError
from ckpt.policies._preservation import LatestN
from ckpt.step_names import StepNames
from ckpt.storage._local.storage import LocalStorage
from ckpt.storage._resolve import PathLike

# Of the folder and of all that is in it: memory is read by its owner alone.
_PRIVATE = 0o700

Service = RootService | TieredService


def check_tiers(tiers: object, *, read_only: bool, processes: int) -> SharedMemory | None:
    """Return the tier in memory that a manager is to have, or None.

    Raises:
        InvalidArgumentError: These cannot be the tiers of such a manager.
    """
    what = "a list of tiers, such as [ckpt.tiers.SharedMemory()]"
    if isinstance(tiers, SharedMemory):
        raise invalid("tiers", tiers, f"a list: tiers=[{tiers!r:.80}]")
    if not isinstance(tiers, Sequence) or isinstance(tiers, str | bytes):
        raise invalid("tiers", tiers, what)
    for each in tiers:
        if not isinstance(each, SharedMemory):
            raise invalid("tiers", each, what)
    if len(tiers) > 1:
        raise InvalidArgumentError("tiers=: one SharedMemory is enough for all snapshots")
    memory: SharedMemory | None = next(iter(tiers), None)
    if memory is None:
        return None
    if read_only:
        raise InvalidArgumentError(
            "tiers=: with read_only=True nothing is saved, and steps are read from the root. Leave "
            "one of the two out"
        )
    if processes > 1:
        raise InvalidArgumentError(
            f"tiers=: SharedMemory holds the snapshots of one process, and this job has "
            f"{processes}. Leave it out, and save() to the root"
        )
    return memory


def with_memory(
    settings: SharedMemory,
    service: RootService,
    loop: EngineLoop,
    engine: Engine,
    root: PathLike,
    names: StepNames,
    signals: Iterable[int],
    timeouts: Timeouts,
) -> TieredService:
    """Return a service that also keeps snapshots in memory.

    Args:
        settings: The tier in memory.
        service: The service of the root.
        loop: Its loop.
        engine: Its engine.
        root: The root, as the user has named it.
        names: How its steps are called.
        signals: The signals that announce the end, beside SIGTERM.
        timeouts: Time limits.

    Raises:
        InvalidArgumentError: No other process can write to the root.
    """
    folder = SharedFolder(folder_of(settings.directory, service.storage.location, 0, 1))
    snapshots = RootService(
        loop,
        LocalStorage(folder.steps, timeouts, mode=_PRIVATE),
        # The same memory for staging; but what a step shares with the one before is told by root.
        replace(engine, last_save=None),
        save_policy=None,
        preservation=LatestN(1),
        deletion=None,
        names=names,
        metadata=None,
        backlog="wait",
        read_only=False,
        missing="empty",
        timeouts=timeouts,
        preemption=Preemption(),
        peers=None,
        # There may be one every few seconds.
        log_level=logging.DEBUG,
    )
    place = place_to_json(root)
    memory = MemoryTier(settings, snapshots, folder, place, service.storage, signals)
    return TieredService(service, memory)
