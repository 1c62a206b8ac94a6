"""Copies that are written anew: virtual steps with their arrays, and parts of items."""

from __future__ import annotations

from ckpt._conversion.checkpoint_items import items_of
from ckpt._conversion.copies.step_location import StepLocation
from ckpt._conversion.whole_checkpoint import CheckpointTarget
from ckpt._events import Observer
from ckpt._format.manifest import Manifest
from ckpt._steps.opened import OpenedStep
from ckpt.storage._manifests import while_read

_BUDGET_BYTES = 256 << 20


async def write_anew(
    source: StepLocation,
    wanted: Manifest,
    target: StepLocation,
    *,
    overwrite: bool,
    observers: tuple[Observer, ...],
) -> int:
    """Write a step, or a part of one, as a whole checkpoint with its original times and lineage.

    Arrays pass through memory piece by piece, and are compared with their digests.

    Args:
        source: The step.
        wanted: Its manifest, reduced to the part to copy.
        target: The place of the copy.
        overwrite: True to replace a checkpoint at that place.
        observers: Observers of the events of the save.

    Returns:
        The bytes of the arrays.

    Raises:
        CorruptCheckpointError: The step is damaged; names the leaf.
        UnsupportedFormatError: Each process of a job has a part of the arrays on its own disk.
        StepDeletedError: The step was deleted or replaced meanwhile.
        StepExistsError: There is a checkpoint at the place of the copy.
        StorageError: A storage refused.

    Cancellation: nothing is left behind, unless the step was just being published.
    """
    made = CheckpointTarget(
        target.storage, target.name, wanted.step, overwrite, None, observers, keeps_times=True
    )
    async with while_read(source.storage, source.name, wanted):
        opened = OpenedStep(source.storage, source.name, wanted)
        items = await items_of(opened, _BUDGET_BYTES // 4)
        return (await made.write(items, wanted, _BUDGET_BYTES // 2)).nbytes
