"""Steps of a root: their names, which of them are committed, and their manifests."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from typing import TypeGuard

import anyio

from ckpt._arguments import shown
from ckpt._format.manifest import (
    FILE_NAME,
    MAX_BYTES,
    Manifest,
    decode,
)
from ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    InvalidArgumentError,
    NotACheckpointError,
    StepDeletedError,
    StepNotFoundError,
    StorageError,
    located,
)
from ckpt.storage._base import Storage

__all__ = [
    "check_item_name",
    "check_step",
    "lies_in",
    "read_manifest",
    "refuse_deleted",
    "while_read",
]

# Nineteen digits hold every step a 64-bit counter can.
_GREATEST_STEP = 10**19 - 1
_ITEM = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\Z")
# Names that Orbax or this library use in a step or a root for something else.
RESERVED_ITEMS = frozenset(
    {
        "AUTO",
        "_CHECKPOINT_DELETION",
        "_CHECKPOINT_METADATA",
        "_METADATA",
        "_sharding",
        "_strings.json",
        "array_metadatas",
        "commit_success.txt",
        "lanes",
        "manifest.ocdbt",
        "metadata",
        "metrics",
        "orbax.checkpoint",
        FILE_NAME,
    }
)


def check_step(step: object) -> int:
    """Return `step` if it is one.

    Raises:
        InvalidArgumentError: It is not a whole number from 0 to 10**19 - 1.
    """
    # numpy integers are steps too; bool is an int only by accident.
    number = None if isinstance(step, bool) or not hasattr(step, "__index__") else step.__index__()
    if number is None or not 0 <= number <= _GREATEST_STEP:
        raise InvalidArgumentError(
            f"step={shown(step)}: expected a whole number, 0 or greater, such as the training step"
        )
    return int(number)


def check_item_name(name: object) -> str:
    """Return `name` if an item may be called so.

    Raises:
        InvalidArgumentError: It could leave the step's directory, or is reserved.
    """
    if not _may_name_an_item(name):
        raise InvalidArgumentError(
            f"item name {name!r:.120}: expected 1 to 100 letters, digits, '_', '-' or '.', not "
            f"beginning with '.' or '-', and none of {', '.join(sorted(RESERVED_ITEMS))}"
        )
    return name


def _may_name_an_item(name: object) -> TypeGuard[str]:
    return (
        isinstance(name, str)
        and _ITEM.match(name) is not None
        and name not in RESERVED_ITEMS
        # Orbax takes what has this in its name for unfinished.
        and ".orbax-checkpoint-tmp" not in name
        and not name.startswith("ocdbt.process_")
    )


def lies_in(entry: str, manifest: Manifest) -> str:
    """Return the directory in which the files of an entry lie, relative to the root."""
    return f"{entry}/{manifest.folder}" if manifest.folder else entry


async def read_manifest(storage: Storage, entry: str, *, step: int | None = None) -> Manifest:
    """Return the manifest of an entry.

    Args:
        storage: The root.
        entry: The entry's name.
        step: The step it should be, or None for a one-shot checkpoint or any step.

    Raises:
        StepNotFoundError: `step` was given and there is no such committed step.
        NotACheckpointError: There is no checkpoint of this library at that entry.
        CorruptCheckpointError: Its manifest is damaged.
        UnsupportedFormatError: It is of a later format.
    """
    where = f"{storage.location}/{entry}"
    data = await storage.read(entry, FILE_NAME, MAX_BYTES)
    if data is None and step is not None:
        raise StepNotFoundError(f"there is no such step in {storage.location}", step=step)
    if data is None:
        raise NotACheckpointError(
            f"{where} holds no committed checkpoint: there is no {FILE_NAME} in it. Give the path "
            "that ckpt.save wrote, or one step of a manager's root (runs/a/100)"
        )
    with located(step=step):
        manifest = await anyio.to_thread.run_sync(
            lambda: decode(data, where=f"{where}/{FILE_NAME}")
        )
    if step is not None and manifest.step != step:
        raise CorruptCheckpointError(
            f"{where} holds step {manifest.step}: the directory was renamed. Give it its own name "
            "back",
            step=step,
        )
    if manifest.unnamed and len(manifest.items) != 1:
        raise CorruptCheckpointError(
            f"{where}: the manifest says that one object was saved without a name, and has "
            f"{len(manifest.items)} items",
            step=step,
        )
    # Items are directories: a name from a file must not lead out of the step.
    wrong = next((name for name in manifest.items if not _may_name_an_item(name)), None)
    if wrong is not None:
        raise CorruptCheckpointError(f"{where}: {wrong!r:.120} cannot be the name of an item")
    return manifest


@contextlib.asynccontextmanager
async def while_read(storage: Storage, entry: str, manifest: Manifest) -> AsyncIterator[None]:
    """Tell damage that the body meets in a checkpoint from its deletion meanwhile.

    Raises:
        StepDeletedError: The body failed, and what `manifest` describes is not there any more.
    """
    try:
        yield
    except (CorruptCheckpointError, StorageError) as error:
        await refuse_deleted(storage, entry, manifest, error)
        raise


async def refuse_deleted(
    storage: Storage, entry: str, manifest: Manifest, error: Exception | None = None
) -> None:
    """Raise if what a manifest describes is not there any more.

    Args:
        storage: The root.
        entry: The entry's name.
        manifest: What was there.
        error: What gave reason to look.

    Raises:
        StepDeletedError: It was deleted or replaced.
    """
    fate = await _fate_of(storage, entry, manifest)
    if fate is not None:
        raise StepDeletedError(
            f"{storage.location}/{entry} was {fate} while it was read. Take the latest step, or "
            "let the writer keep more steps",
            step=manifest.step,
        ) from error


async def _fate_of(storage: Storage, entry: str, manifest: Manifest) -> str | None:
    """Return what became of what `manifest` describes, or None if it is still there."""
    try:
        data = await storage.read(entry, FILE_NAME, MAX_BYTES)
        if data is None:
            return "deleted"
        found = await anyio.to_thread.run_sync(lambda: decode(data, where=entry))
    except CheckpointError:
        # What cannot be read, or is damaged, has not been deleted.
        return None
    return None if found.attempt == manifest.attempt else "replaced"
