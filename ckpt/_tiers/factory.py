"""Make the service of a run from the `tiers` of its manager."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ckpt._arguments import invalid
from ckpt._engine.engine import Engine
from ckpt._steps.index import StepIndex
from ckpt._steps.root import RootOptions
from ckpt._steps.saves.history import Preemption
from ckpt._steps.saves.queue import Run
from ckpt._steps.service import RootService, make_job, root_service
from ckpt._tiers.agent.client import AgentClient
from ckpt._tiers.agent.messages import (
    AgentMessage,
    AgentSetup,
    SnapshotSettings,
    ToAgent,
    TransferLeg,
    place_to_json,
)
from ckpt._tiers.memory import MemoryRoot, MemoryTier
from ckpt._tiers.peer_replication import CopiedSteps, PeerReplication
from ckpt._tiers.service import MemoryHooks, SaverHooks, TieredService, TierHooks
from ckpt._tiers.settings import SharedMemory, Tier
from ckpt._tiers.shared_folder import SharedFolder, folder_of
from ckpt._tiers.tier_drains import TierDrains
from ckpt.coordination._base import Coordinator
from ckpt.coordination._jobs import OwnDisks, has_own_disks
from ckpt.errors import InvalidArgumentError
from ckpt.keep._keep_policies import Latest, as_keep_rules
from ckpt.storage._base import Storage
from ckpt.storage._local.config import Local
from ckpt.storage._resolve import PathLike, local_path, open_root

if TYPE_CHECKING:
    from ckpt._job.solo import ProcessJob

logger = logging.getLogger("ckpt")


def service_with(
    tiers: object, root: PathLike, job: Coordinator, *, read_only: bool
) -> Callable[..., RootService]:
    """Return the function that makes the service of a manager with these tiers.

    Args:
        tiers: The tiers, as they were given.
        root: The root, as it was given.
        job: The job that this process is part of.
        read_only: True if the manager saves nothing.

    Raises:
        InvalidArgumentError: Such a manager cannot have these tiers.
    """
    what = "a list of tiers, such as [ckpt.tiers.SharedMemory(), ckpt.tiers.Tier('/nvme/run')]"
    if isinstance(tiers, SharedMemory | Tier):
        raise invalid("tiers", tiers, f"a list: tiers=[{tiers!r:.80}]")
    if not isinstance(tiers, Sequence) or isinstance(tiers, str | bytes):
        raise invalid("tiers", tiers, what)
    wrong = [each for each in tiers if not isinstance(each, SharedMemory | Tier)]
    if wrong:
        raise invalid("tiers", wrong[0], what)
    memory = [each for each in tiers if isinstance(each, SharedMemory)]
    near = [each for each in tiers if isinstance(each, Tier)]
    if len(memory) > 1:
        raise InvalidArgumentError("tiers=: one SharedMemory is enough for all snapshots")
    if memory and tiers[0] is not memory[0]:
        raise InvalidArgumentError(
            "tiers=: the nearest place comes first: put SharedMemory before the others"
        )
    if not tiers:
        return root_service
    if read_only:
        raise InvalidArgumentError(
            "tiers=: with mode='r' nothing is saved, and steps are read from the root. Leave "
            "one of the two out"
        )
    if job.process_count > 1 and near:
        near = [_tier_of_process(near, job)]
    return partial(_with_tiers, memory[0] if memory else None, near, root, job)


def _tier_of_process(near: Sequence[Tier], job: Coordinator) -> Tier:
    """Return the tier of one process of a job, which is a folder in the given tier.

    Raises:
        InvalidArgumentError: The processes of a job cannot have these tiers.
    """
    count = job.process_count
    if has_own_disks(job):
        raise InvalidArgumentError(
            "tiers=: steps are copied from a Tier to a root that all processes of the job see, and "
            "here each has a root of its own (OwnDisks). Leave one of the two out"
        )
    if len(near) > 1:
        raise InvalidArgumentError(
            f"tiers=: in a job of several processes, as this one of {count}, there is one Tier at "
            f"most between memory and the root, and {len(near)} were given"
        )
    tier = near[0]
    path = local_path(tier.path)
    if path is None:
        raise invalid(
            "path",
            tier.path,
            "a directory: in a job of several processes, each keeps its part of a step there",
            of="Tier",
        )
    own = path / f"process_{job.process_index}-of-{count}"
    given = tier.path if isinstance(tier.path, Local) else Local(path)
    return dataclasses.replace(tier, path=dataclasses.replace(given, path=own))


def _with_tiers(
    settings: SharedMemory | None,
    tiers: Sequence[Tier],
    root: PathLike,
    job: Coordinator,
    run: Run,
    storage: Storage,
    engine: Engine,
    options: RootOptions,
    own: ProcessJob,
) -> TieredService:
    """Return the service of a run with tiers.

    Args:
        settings: The tier in memory, if there is one.
        tiers: The tiers on a storage, the nearest first.
        root: The root, as it was given.
        job: The job that this process is part of.
        run: Passed to `root_service`, like `storage`, `engine`, `options` and `own`.
        storage: See `run`.
        engine: See `run`.
        options: See `run`.
        own: See `run`.

    Raises:
        InvalidArgumentError: The agent process cannot open one of the places, or two are the same.
    """
    # Each process of a job has a place of its own for its steps.
    process = job.process_index, job.process_count
    location, timeouts = storage.location, options.timeouts
    places: list[StepIndex] = []
    run = replace(run, places=places)

    def tiered() -> TieredService:
        return service

    disks = OwnDisks(job, f"tier of {location}")
    near = [
        root_service(
            run,
            open_root(tier.path, timeouts),
            engine,
            replace(
                options,
                keep=None if tier.keep is None else as_keep_rules(tier.keep),
                deletion=None,
            ),
            make_job(disks, timeouts, location, engine),
            [TierHooks(tiered, leg) if leg else SaverHooks(tiered)],
        )
        for leg, tier in enumerate(tiers)
    ]
    at_root = [] if near else [SaverHooks(tiered)]
    last = root_service(run, storage, engine, options, own, at_root)
    sites = [place_to_json(tier.path) for tier in tiers] + [place_to_json(root)]
    locations = [each.storage.location for each in (*near, last)]
    for number, where in enumerate(locations):
        if os.path.realpath(where) in map(os.path.realpath, locations[:number]):
            raise InvalidArgumentError(f"tiers=: {where} is there twice")
    folder: SharedFolder | None = None
    snapshots = None
    if settings is not None:
        if has_own_disks(job):
            # The parts of a snapshot can be joined only in a root that all processes see.
            settings = dataclasses.replace(settings, flush=False)
        folder = SharedFolder(folder_of(settings.directory, location, *process))
        snapshots = SnapshotSettings(
            str(folder.path),
            settings.flush,
            settings.grace_seconds,
            settings.kept_seconds,
            process,
        )
    setup = AgentSetup(
        os.getpid(),
        sites[-1],
        tuple(sorted({int(signal.SIGTERM), *map(int, run.preemption.signals)})),
        timeouts.exit,
        snapshots,
        tuple(
            TransferLeg(
                sites[number],
                sites[number + 1],
                tier.bytes_per_second,
                tier.most_waiting,
                process,
            )
            for number, tier in enumerate(tiers)
        ),
    )
    parts: list[MemoryTier | TierDrains] = []

    def on_message(message: AgentMessage) -> None:
        for part in parts:
            part.heard(message)

    def greeting() -> list[ToAgent]:
        return [message for part in parts for message in part.greeting()]

    agent = AgentClient(setup, on_message, greeting)
    memory = None
    if settings is not None and folder is not None:
        memory_root = MemoryRoot(folder, storage, timeouts, process)
        copied = _copied_steps(settings, job)
        in_memory = _service_of_memory(memory_root, last, copied, job, [MemoryHooks(tiered)])
        peers = None
        if copied is not None and settings.peers is not None:
            peers = PeerReplication(settings.peers, job, in_memory, folder, copied, agent)
        memory = MemoryTier(settings, in_memory, folder, memory_root, storage, agent, peers)
        parts.append(memory)
    drains = None
    if near:
        pairs = list(zip(near, tiers, strict=True))
        drains = TierDrains(pairs, last, agent)
        parts.append(drains)
    service = TieredService(last, near, memory, drains, agent)
    # In a job, the processes may see different steps in the places.
    places += last.root.processes.found_here([each.root.index for each in service.places])
    return service


def _copied_steps(memory: SharedMemory, job: Coordinator) -> CopiedSteps | None:
    """Return the choice of snapshots that stay because of copies on peers; None without copies."""
    if memory.peers is None:
        return None
    if job.process_count == 1:
        logger.warning("SharedMemory(peers=...): this process is alone, so there are no peers")
        return None
    distance = memory.peers.distance or 1
    if distance % job.process_count == 0:
        raise invalid(
            "distance",
            distance,
            f"no multiple of {job.process_count}, the processes of the job: each would have its "
            "copies at itself",
            of="PeerCopies",
        )
    return CopiedSteps()


def _service_of_memory(
    storage: MemoryRoot,
    service: RootService,
    copied: CopiedSteps | None,
    job: Coordinator,
    hooks: Sequence[MemoryHooks],
) -> RootService:
    # The engine uses the same memory for staging, but no base step: reuse of unchanged files is
    # tracked for each root.
    staging = dataclasses.replace(service.engine.staging, backlog="wait")
    engine = replace(service.engine, staging=staging, base_step=None, writes_later=True)
    timeouts = service.root.options.timeouts
    # Snapshots may come every few seconds.
    options = RootOptions(
        service.root.names,
        timeouts,
        missing="empty",
        keep=copied or Latest(1),
        log_level=logging.DEBUG,
    )
    disks = OwnDisks(job, f"snapshots of {service.storage.location}")
    own = make_job(disks, timeouts, storage.location, engine)
    run = replace(service.run, preemption=Preemption())
    return root_service(run, storage, engine, options, own, hooks)
