"""Adoption: make a virtual step from a checkpoint of another library, and publish it."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ckpt._commit import StepInfo, step_info
from ckpt._engine.engine import Engine
from ckpt._engine.save.republication import republish
from ckpt._engine.save.save_request import SaveRequest
from ckpt._format.manifest import Manifest, encode, features, sizes
from ckpt._format.manifest_head import (
    FILE_NAME,
    FORMAT_VERSION,
    OWN_FORMAT,
    json_metrics,
    plain_metrics,
)
from ckpt._redaction import redact
from ckpt._runtime.futures import for_each
from ckpt._runtime.threads import run_in_thread
from ckpt._steps.opened import OpenedStep
from ckpt._steps.saves.one_shot import make_way
from ckpt._tree.table import format_bytes
from ckpt.errors import InvalidArgumentError, located
from ckpt.storage._base import Attempt, Storage

logger = logging.getLogger("ckpt")


async def adopt_step(
    opened: OpenedStep, where: str, storage: Storage, request: SaveRequest, engine: Engine
) -> StepInfo:
    """Make a virtual step from a checkpoint that another library wrote.

    Args:
        opened: The checkpoint.
        where: Path of the checkpoint, for messages.
        storage: The root of the new step.
        request: The name of the new step, and whether it may replace another step; it has no items.
        engine: Source of the clock and of the recorded versions.

    Raises:
        InvalidArgumentError: The checkpoint was written by this library.
        StepExistsError: The step exists.
        CorruptCheckpointError: A file of the checkpoint is missing.
        StorageError: A store refused.
    """
    # Imported here, since most programs never need it.
    from ckpt._interop.adoption import adopted

    old = opened.manifest
    if opened.foreign is None:
        raise InvalidArgumentError(
            f"{redact(where)} is a checkpoint of this library, or a part of one. Its manager may "
            "delete it, and what was adopted would be lost with it. Take ckpt.convert instead"
        )
    await make_way(storage, request)
    began_ns = engine.now_ns()
    new = await adopted(old, opened.foreign)
    manifests: list[Manifest] = []

    async def write(attempt: Attempt) -> Mapping[str, int]:
        await for_each(lambda path: storage.write(attempt, path, new.files[path]), new.files)
        manifest = Manifest(
            format=OWN_FORMAT,
            version=FORMAT_VERSION,
            requires=features(new.items, attempt.folder, virtual=True),
            step=request.step,
            attempt=attempt.id,
            folder=attempt.folder,
            unnamed=old.unnamed,
            items=dict(new.items),
            metrics=None if old.metrics is None else plain_metrics(json_metrics(old.metrics)),
            metadata=old.metadata,
            created_ns=began_ns,
            committed_ns=engine.now_ns(),
            writer=engine.versions,
            process_count=1,
            files=new.entries,
            sources=dict(new.sources),
        )
        encoded = await run_in_thread(encode, manifest)
        await storage.write(attempt, FILE_NAME, encoded)
        manifests.append(manifest)
        return sizes(manifest, encoded)

    with located(step=request.step):
        await republish(storage, request.step_dir, write, overwrite=request.replaces_any)
    [manifest] = manifests
    info = step_info(manifest, f"{storage.location}/{request.step_dir}")
    logger.info(
        "%s is now the step %s: %s in %d files stay where they are, without digests until the "
        "first verify()",
        redact(where),
        redact(info.path),
        format_bytes(info.nbytes),
        len(new.sources),
    )
    return info
