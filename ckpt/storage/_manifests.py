"""Manifests of a root: reading and checking them, and what a failed read means."""

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
# Smaller manifests, of about 40 leaves, are decoded in less time than a thread takes to begin.
_SMALL_BYTES = 8 << 10
_ITEM = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\Z")
# Names that Orbax or this library use for something else in a step or a root.
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
    """Return `step` as an int if it is a valid step.

    Raises:
        InvalidArgumentError: It is not a whole number from 0 to 10**19 - 1.
    """
    # numpy integers are valid, too. A bool is an int only by accident.
    number = None if isinstance(step, bool) or not hasattr(step, "__index__") else step.__index__()
    if number is None or not 0 <= number <= _GREATEST_STEP:
        raise InvalidArgumentError(
            f"step={shown(step)}: expected a whole number, 0 or greater, such as the training step"
        )
    return int(number)


def check_item_name(name: object) -> str:
    """Return `name` if it is a valid name of an item.

    Raises:
        InvalidArgumentError: It could lead out of the directory of the step, or is reserved.
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
        # Orbax takes everything with this in its name for unfinished.
        and ".orbax-checkpoint-tmp" not in name
        and not name.startswith("ocdbt.process_")
    )


def lies_in(entry: str, manifest: Manifest) -> str:
    """Return the directory that holds the files of an entry, relative to the root."""
    return f"{entry}/{manifest.folder}" if manifest.folder else entry


async def read_manifest(storage: Storage, entry: str, *, step: int | None = None) -> Manifest:
    """Return the manifest of an entry.

    Args:
        storage: The root.
        entry: The entry's name.
        step: The expected step, or None for a one-shot checkpoint or any step.

    Raises:
        StepNotFoundError: `step` was given, and is not committed.
        NotACheckpointError: The entry is not a checkpoint of this library.
        CorruptCheckpointError: The manifest is damaged.
        UnsupportedFormatError: The manifest is of a later format.
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
        manifest = await _decoded(data, f"{where}/{FILE_NAME}")
    if step is not None and manifest.step != step:
        raise CorruptCheckpointError(
            f"{where} holds step {manifest.step}: the directory was renamed. Give it its old name "
            "back",
            step=step,
        )
    if manifest.unnamed and len(manifest.items) != 1:
        raise CorruptCheckpointError(
            f"{where}: the manifest says that one object was saved without a name, and has "
            f"{len(manifest.items)} items",
            step=step,
        )
    # Items are directories, so a name in a manifest must not lead out of the step.
    wrong = next((name for name in manifest.items if not _may_name_an_item(name)), None)
    if wrong is not None:
        raise CorruptCheckpointError(f"{where}: {wrong!r:.120} cannot be the name of an item")
    return manifest


async def _decoded(data: bytes, where: str) -> Manifest:
    if len(data) <= _SMALL_BYTES:
        return decode(data, where=where)
    return await anyio.to_thread.run_sync(lambda: decode(data, where=where))


@contextlib.asynccontextmanager
async def while_read(storage: Storage, entry: str, manifest: Manifest) -> AsyncIterator[None]:
    """Tell damage from deletion if the body fails to read a checkpoint.

    Raises:
        StepDeletedError: The body failed because the checkpoint of `manifest` is gone.
    """
    try:
        yield
    except (CorruptCheckpointError, StorageError) as error:
        await refuse_deleted(storage, entry, manifest, error)
        raise


async def refuse_deleted(
    storage: Storage, entry: str, manifest: Manifest, error: Exception | None = None
) -> None:
    """Raise if the checkpoint that a manifest describes is gone.

    Args:
        storage: The root.
        entry: The entry's name.
        manifest: The manifest that was read before.
        error: The error that gave reason to check.

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
    """Return what happened to the checkpoint of `manifest`; None if it is still there."""
    try:
        data = await storage.read(entry, FILE_NAME, MAX_BYTES)
        if data is None:
            return "deleted"
        found = await _decoded(data, entry)
    except CheckpointError:
        # A manifest that cannot be read, or is damaged, was not deleted.
        return None
    return None if found.attempt == manifest.attempt else "replaced"
