"""The steps of a one-shot save that do not depend on whether its caller waits for it."""

from __future__ import annotations

import logging

from ckpt._commit import CommitHooks, StepInfo, step_info
from ckpt._engine.engine import Engine
from ckpt._engine.save.joint.multihost import JointSave, MultihostSave, SoloSave
from ckpt._engine.save.request import SaveRequest
from ckpt._format.manifest import Manifest
from ckpt._redaction import redact
from ckpt._steps.saves.overwrite import make_way, with_plain_metrics
from ckpt._tree.table import size_text
from ckpt.coordination._peers import Peers
from ckpt.errors import InvalidArgumentError
from ckpt.storage._base import Storage

logger = logging.getLogger("ckpt")


def processes_of(peers: Peers | None, engine: Engine, step_dir: str) -> JointSave:
    """Return the processes' side of a save.

    Raises:
        InvalidArgumentError: Every process has a disk of its own.
    """
    if peers is None:
        return SoloSave(engine.arena.capacity)
    if peers.own_disks:
        raise InvalidArgumentError(
            "processes with disks of their own (OwnDisks) can only save with a manager, which "
            "keeps track of all disks: use CheckpointManager(coordinator=...)"
        )
    return MultihostSave(peers, f"save-{step_dir}", f"the save of {step_dir}")


async def prepared(storage: Storage, request: SaveRequest, processes: JointSave) -> SaveRequest:
    """Make the folder above, remove what dead writers left in it, and make way for the save."""
    if processes.publishes:
        await storage.prepare()
        await storage.sweep()
        await make_way(storage, request)
    return await with_plain_metrics(request)


def finished(
    storage: Storage, request: SaveRequest, manifest: Manifest, hooks: CommitHooks
) -> StepInfo:
    """Log a save that was published, and return what was saved."""
    info = step_info(manifest, f"{storage.location}/{request.step_dir}", hooks.watch.taken)
    logger.info(
        "saved %s: %s in %.2f s (blocked %.2f s)",
        redact(info.path),
        size_text(info.nbytes),
        hooks.watch.elapsed,
        hooks.watch.taken.blocked or 0.0,
    )
    return info
