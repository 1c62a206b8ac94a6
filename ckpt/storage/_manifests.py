"""Manifests of a root: reading and checking them, and finding out why a read has failed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ckpt._format.manifest_head import (
    FILE_NAME,
    MAX_BYTES,
    OWN_FORMAT,
    WENT_BACK_NOTE,
    is_same_save,
)
from ckpt._format.step_files import is_item_name
from ckpt._runtime.threads import run_in_thread
from ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    NotACheckpointError,
    StepDeletedError,
    StepNotFoundError,
    StorageError,
    located,
)
from ckpt.storage._base import ReadsSteps, Storage

if TYPE_CHECKING:
    from ckpt._format.manifest import Manifest

# Smaller manifests, of about 40 leaves, are decoded in less time than a thread takes to begin.
_SMALL_BYTES = 8 << 10


def files_folder(step_dir: str, manifest: Manifest) -> str:
    """Return the directory that holds the files of a step directory, relative to the root."""
    return f"{step_dir}/{manifest.folder}" if manifest.folder else step_dir


async def note_branch(storage: Storage, left_behind: Sequence[int]) -> None:
    """Note in a root that a step about to be published leaves others behind.

    Readers look at `Manifest.left_behind` only in roots that have this note.
    """
    if left_behind:
        await storage.put_note(WENT_BACK_NOTE, b"", replace=False)


async def read_manifest(storage: ReadsSteps, step_dir: str, *, step: int | None = None) -> Manifest:
    """Return the manifest of a step directory; see `read_sized`."""
    return (await read_sized(storage, step_dir, step=step))[0]


async def read_sized(
    storage: ReadsSteps, step_dir: str, *, step: int | None = None
) -> tuple[Manifest, int]:
    """Return the manifest of a step directory, and the size of its file in bytes.

    Args:
        storage: The root.
        step_dir: Name of the step directory.
        step: The expected step, or None for a one-shot checkpoint or any step.

    Raises:
        StepNotFoundError: `step` was given, and is not committed.
        NotACheckpointError: The step directory is not a checkpoint of this library.
        CorruptCheckpointError: The manifest is damaged.
        UnsupportedFormatError: The manifest is of a later format.
    """
    where = f"{storage.location}/{step_dir}"
    data = await storage.read(step_dir, FILE_NAME, MAX_BYTES)
    if data is None and step is not None:
        raise StepNotFoundError(f"there is no such step in {storage.location}", step=step)
    if data is None:
        raise no_manifest(where)
    with located(step=step):
        manifest = await _decoded(data, f"{where}/{FILE_NAME}")
    if step is not None and manifest.step is None:
        # A one-shot checkpoint counts as the step that its directory is named after.
        manifest = replace(manifest, step=step)
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
    # Items are directories: a name from a file must not lead out of the step.
    names = [*manifest.items, *(each.item for each in manifest.dropped)]
    wrong = next((name for name in names if not is_item_name(name)), None)
    if wrong is not None:
        raise CorruptCheckpointError(f"{where}: {wrong!r:.120} cannot be the name of an item")
    return manifest, len(data)


def no_manifest(where: str) -> NotACheckpointError:
    return NotACheckpointError(
        f"{where} holds no committed checkpoint: there is no {FILE_NAME} in it. Give the path that "
        "ckpt.save wrote, or one step of a manager's root (runs/a/100)"
    )


async def _decoded(data: bytes, where: str) -> Manifest:
    # Imported late: it needs numpy, and lists of steps do not.
    from ckpt._format.manifest import decode

    if len(data) <= _SMALL_BYTES:
        return decode(data, where=where)
    return await run_in_thread(lambda: decode(data, where=where))


@contextlib.asynccontextmanager
async def while_read(storage: ReadsSteps, step_dir: str, manifest: Manifest) -> AsyncIterator[None]:
    """Tell damage from deletion if the body fails to read a checkpoint.

    Raises:
        StepDeletedError: The body failed because the checkpoint of `manifest` is gone.
    """
    try:
        yield
    except (CorruptCheckpointError, StorageError) as error:
        await refuse_deleted(storage, step_dir, manifest, error)
        raise


async def refuse_deleted(
    storage: ReadsSteps, step_dir: str, manifest: Manifest, error: Exception | None = None
) -> None:
    """Raise if the checkpoint that a manifest describes is gone.

    `manifest` was read before; `error` is the error of the read that failed.

    Raises:
        StepDeletedError: The checkpoint was deleted or replaced.
    """
    fate = await _fate_of(storage, step_dir, manifest)
    if fate is not None:
        raise StepDeletedError(
            f"{storage.location}/{step_dir} was {fate} while it was read. Take the latest step, or "
            "let the writer keep more steps",
            step=manifest.step,
        ) from error


async def _fate_of(storage: ReadsSteps, step_dir: str, manifest: Manifest) -> str | None:
    """Return "deleted" or "replaced" for the checkpoint of `manifest`; None if it is there."""
    try:
        if manifest.format != OWN_FORMAT:
            is_there = await storage.exists(step_dir) or await _is_file(storage, step_dir)
            return None if is_there else "deleted"
        data = await storage.read(step_dir, FILE_NAME, MAX_BYTES)
        if data is None:
            return "deleted"
        found = await _decoded(data, step_dir)
    except CheckpointError:
        # A manifest that cannot be read, or is damaged, was not deleted.
        return None
    return None if found.attempt == manifest.attempt else "replaced"


async def has_lost_items(storage: ReadsSteps, step_dir: str, manifest: Manifest) -> bool:
    """Return True if a checkpoint is still there and has only lost items.

    `manifest` was read before.
    """
    try:
        found = await read_manifest(storage, step_dir, step=manifest.step)
    except CheckpointError:
        return False
    return found.attempt != manifest.attempt and is_same_save(found, manifest)


async def _is_file(storage: ReadsSteps, name: str) -> bool:
    """Return True if a single-file checkpoint of another library is still there."""
    try:
        await storage.read_block("", name, 0, memoryview(bytearray(1)))
    except CorruptCheckpointError:
        return False
    return True
