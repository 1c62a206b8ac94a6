"""Pins that people add and remove by path."""

from __future__ import annotations

from msgspec import Struct

from ckpt._inspection.locations import RunRoot, checkpoint_at, locate, step_path_of
from ckpt._steps.pins import check_pin_name, pin, pins, unpin
from ckpt.errors import CorruptCheckpointError, InvalidArgumentError, NotACheckpointError


class PinChange(Struct, frozen=True):
    """Steps that were pinned or unpinned.

    Attributes:
        root: Path of their root.
        name: Name of the pin.
        steps: Numbers of the steps.
        pinned: True if they are pinned now.
    """

    root: str
    name: str
    steps: list[int]
    pinned: bool


async def pin_at(path: str, name: str) -> PinChange:
    """Pin a step; for a root, its latest step.

    Raises:
        InvalidArgumentError: The name is not valid for a pin, or the path is a single checkpoint.
        CheckpointError: There is no step, or it cannot be read or pinned.
    """
    check_pin_name(name)
    found = await checkpoint_at(path)
    step = found.opened.manifest.step
    if step is None:
        raise InvalidArgumentError(
            f"{found.location} is a single checkpoint: nothing deletes it, so it cannot be pinned"
        )
    await found.storage.prepare()

    async def is_committed() -> bool:
        return await found.storage.exists(found.opened.step_dir)

    await pin(found.storage, step, name, is_committed)
    return PinChange(found.storage.location, name, [step], pinned=True)


async def unpin_at(path: str, name: str) -> PinChange:
    """Remove a pin from a step, even a damaged or deleted one; for a root, from all steps with it.

    Raises:
        InvalidArgumentError: There is no such pin; lists the existing ones.
        CheckpointError: There is neither a root nor a step, or the storage cannot be written.
    """
    check_pin_name(name)
    place = step_path_of(path)
    try:
        found = await locate(path)
    except (NotACheckpointError, CorruptCheckpointError):
        if place is None:
            raise
        found = place.root
    if isinstance(found, RunRoot) and (place is None or found is not place.root):
        storage, only = found.storage, None
    elif place is not None:
        storage, only = place.root.storage, place.step
    else:
        raise InvalidArgumentError(f"{found.location} is a single checkpoint, which has no pins")
    pinned = {
        step: [each.name for each in some if each.seconds is None]
        for step, some in (await pins(storage)).items()
        if only in (None, step)
    }
    steps = [step for step, names in pinned.items() if name in names]
    if not steps:
        where = storage.location if only is None else f"step {only} of {storage.location}"
        others = sorted({each for names in pinned.values() for each in names})
        raise InvalidArgumentError(
            f"no pin of {where} is called {name!r}; it has "
            + (", ".join(map(repr, others)) or "none")
        )
    for step in steps:
        await unpin(storage, step, name)
    return PinChange(storage.location, name, steps, pinned=False)
