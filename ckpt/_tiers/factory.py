"""Make the service of a run from the `tiers` of its manager."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from ckpt._arguments import invalid
from ckpt._steps.root import RootOptions
from ckpt._steps.saves.history import Preemption
from ckpt._steps.service import RootService, make_job
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
from ckpt._tiers.service import TieredService
from ckpt._tiers.settings import SharedMemory, Tier
from ckpt._tiers.shared_folder import SharedFolder, folder_of
from ckpt._tiers.tier_drains import TierDrains
from ckpt.coordination._base import Coordinator
from ckpt.coordination._jobs import OwnDisks, has_own_disks
from ckpt.errors import InvalidArgumentError
from ckpt.keep._keep_policies import Latest, as_keep_rules
from ckpt.storage._local.config import Local
from ckpt.storage._resolve import PathLike, local_path, open_root

logger = logging.getLogger("ckpt")


class Tiers(Struct, frozen=True):
    """The tiers of a manager: the memory of its host, and places on a storage, nearest first."""

    memory: SharedMemory | None
    near: tuple[Tier, ...]


def check_tiers(tiers: object, *, read_only: bool, job: Coordinator) -> Tiers | None:
    """Return the tiers of a manager, or None if it has none; in a job, those of this process.

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
        return None
    if read_only:
        raise InvalidArgumentError(
            "tiers=: with mode='r' nothing is saved, and steps are read from the root. Leave "
            "one of the two out"
        )
    if job.process_count > 1 and near:
        near = [_tier_of_process(near, job)]
    return Tiers(memory[0] if memory else None, tuple(near))


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


def with_tiers(
    tiers: Tiers, service: RootService, root: PathLike, job: Coordinator
) -> TieredService:
    """Return the service of a run with tiers.

    Args:
        tiers: The tiers.
        service: The service of the root.
        root: The root, as it was given.
        job: The job that this process is part of.

    Raises:
        InvalidArgumentError: The agent process cannot open one of the places, or two are the same.
    """
    # Each process of a job has a place of its own for its steps.
    process = job.process_index, job.process_count
    location, engine, options = service.storage.location, service.engine, service.root.options
    disks = OwnDisks(job, f"tier of {location}")
    timeouts, commits = options.timeouts, service.saves.commits
    near = [
        RootService(
            service.loop,
            open_root(tier.path, timeouts),
            engine,
            replace(
                options,
                keep=None if tier.keep is None else as_keep_rules(tier.keep),
                deletion=None,
            ),
            service.preemption,
            commits,
            make_job(disks, timeouts, location, engine),
        )
        for tier in tiers.near
    ]
    places = [place_to_json(tier.path) for tier in tiers.near] + [place_to_json(root)]
    locations = [each.storage.location for each in (*near, service)]
    for number, where in enumerate(locations):
        if os.path.realpath(where) in map(os.path.realpath, locations[:number]):
            raise InvalidArgumentError(f"tiers=: {where} is there twice")
    settings = tiers.memory
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
        places[-1],
        tuple(sorted({int(signal.SIGTERM), *map(int, service.preemption.signals)})),
        timeouts.exit,
        snapshots,
        tuple(
            TransferLeg(
                places[number],
                places[number + 1],
                tier.bytes_per_second,
                tier.most_waiting,
                process,
            )
            for number, tier in enumerate(tiers.near)
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
        at_root = MemoryRoot(folder, service.storage, timeouts, process)
        copied = _copied_steps(settings, job)
        in_memory = _service_of_memory(at_root, service, copied, job)
        peers = None
        if copied is not None and settings.peers is not None:
            peers = PeerReplication(settings.peers, job, in_memory, folder, copied, agent)
        memory = MemoryTier(settings, in_memory, folder, at_root, service.storage, agent, peers)
        parts.append(memory)
    drains = None
    if near:
        pairs = list(zip(near, tiers.near, strict=True))
        drains = TierDrains(pairs, service, agent)
        parts.append(drains)
    return TieredService(service, near, memory, drains, agent)


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
    storage: MemoryRoot, service: RootService, copied: CopiedSteps | None, job: Coordinator
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
    commits = service.saves.commits
    return RootService(service.loop, storage, engine, options, Preemption(), commits, own)
