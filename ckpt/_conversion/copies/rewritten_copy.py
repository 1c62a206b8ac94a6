"""Copies that are written anew: of virtual steps with their arrays, and of parts of items."""

from __future__ import annotations

from ckpt._conversion.copies.place import CopyPlace
from ckpt._conversion.stored_items import items_of
from ckpt._conversion.whole_checkpoint import CheckpointTarget
from ckpt._events import Observer
from ckpt._format.manifest import Manifest
from ckpt._steps.opened import OpenedStep
from ckpt.storage._manifests import while_read

_BUDGET_BYTES = 256 << 20


async def write_anew(
    source: CopyPlace,
    wanted: Manifest,
    target: CopyPlace,
    *,
    overwrite: bool,
    observers: tuple[Observer, ...],
) -> int:
    """Write a step, or a part of one, as a whole checkpoint with the times and lineage it had.

    Arrays pass through memory piece by piece, and are compared with their digests.

    Args:
        source: The step.
        wanted: What its manifest says of what is wanted.
        target: Where it goes.
        overwrite: Whether what is there is replaced.
        observers: Receive the events of the save.

    Returns:
        The bytes of the arrays.

    Raises:
        CorruptCheckpointError: What is stored is damaged; names the leaf.
        UnsupportedFormatError: Each process of a job has a part of the arrays on its own disk.
        StepDeletedError: It was deleted or replaced meanwhile.
        StepExistsError: There is something where it goes.
        StorageError: A storage refused.

    Cancellation: nothing is left behind, unless the step was just being published.
    """
    made = CheckpointTarget(
        target.storage, target.name, wanted.step, overwrite, None, observers, keeps_times=True
    )
    async with while_read(source.storage, source.name, wanted):
        opened = OpenedStep(source.storage, source.name, wanted)
        items = await items_of(opened, source.storage, _BUDGET_BYTES // 4)
        return (await made.write(items, wanted, _BUDGET_BYTES // 2)).nbytes
