"""The end of a save: the manifest of the step, and the name that makes it visible."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio

from ckpt._engine.save.save_request import SaveRequest, step_exists
from ckpt._engine.save.session import SaveSession
from ckpt._format.manifest import ItemEntry, Manifest, encode, features, sizes
from ckpt._format.manifest_head import (
    FILE_NAME,
    FORMAT_VERSION,
    MAX_BYTES,
    PART_FILE,
    FileEntry,
    digest,
)
from ckpt._plan.compared_leaves import how_items_differ
from ckpt._runtime.threads import run_in_thread
from ckpt.errors import CheckpointError, InvalidArgumentError, SaveSkippedError, StepExistsError
from ckpt.storage._base import Storage
from ckpt.storage._manifests import read_manifest


async def write_manifest(
    session: SaveSession,
    request: SaveRequest,
    entries: Mapping[str, ItemEntry],
    part: bytes | None = None,
    *,
    joint: bool = False,
) -> Manifest:
    """Write the other files for other readers, then the manifest; all is durable on return.

    `part` is the part file of a private disk. `joint` is True if other processes take part in the
    save.
    """
    if not entries:
        # A step without items could not be read.
        raise InvalidArgumentError("there is no item to save: a step has at least one")
    attempt = await session.opened()
    engine = session.engine
    committed_ns = engine.now_ns() if request.times_ns is None else request.times_ns[1]
    manifest = Manifest(
        format="ckpt",
        version=FORMAT_VERSION,
        requires=features(entries, attempt.folder, own_disks=part is not None),
        step=request.step,
        attempt=attempt.id,
        folder=attempt.folder,
        unnamed=request.unnamed,
        items=dict(entries),
        metrics=None if request.metrics is None else dict(request.metrics),
        metadata=request.metadata,
        parent=request.parent,
        replaces=list(request.replaces),
        left_behind=list(request.left_behind),
        created_ns=session.created_ns,
        committed_ns=committed_ns,
        writer=engine.versions,
        process_count=session.processes.count,
        save=session.save if part is not None else "",
        statistics=session.hooks.watch.early(),
        files=session.files,
        dropped=list(request.dropped),
        extensions=_notes(session, entries, joint=joint),
    )
    files = await run_in_thread(engine.sidecars.of_step, request.step_dir, manifest)
    if part is not None:
        files[PART_FILE] = part
    async with anyio.create_task_group() as writers:
        for path, data in files.items():
            known = session.files[path] = FileEntry(size=len(data), digest=digest(data))
            writers.start_soon(session.write, path, data, known)
        encoded = await run_in_thread(encode_manifest, manifest)
    await session.storage.write(attempt, FILE_NAME, encoded)
    session.sizes = sizes(manifest, encoded)
    return manifest


def _notes(session: SaveSession, items: Mapping[str, ItemEntry], *, joint: bool) -> dict[str, Any]:
    """Return what extensions say of the step; other processes may have some that this has not."""
    noted = {**session.engine.notes, **dict.fromkeys(session.extensions)}
    if not noted and not any(each.leaves.extensions for each in items.values()):
        return {}
    from ckpt.extensions._readers import notes_on_step

    return notes_on_step(items, noted, "joint" if joint else "new")


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest.

    Raises:
        InvalidArgumentError: The manifest is too large, or the user's metadata is not JSON.
    """
    encoded = encode(manifest)
    if len(encoded) > MAX_BYTES:
        raise InvalidArgumentError(
            f"the manifest of this step would have {len(encoded)} bytes, and readers take at most "
            f"{MAX_BYTES}. Save fewer leaves, less metadata, or arrays in fewer shards"
        )
    return encoded


async def give_name(
    session: SaveSession, request: SaveRequest, manifest: Manifest | None = None
) -> None:
    """Publish the attempt; shielded by the callers.

    A cancellation after the store has published, and before we know of it, would remove a published
    step.

    Args:
        session: The save.
        request: Its request.
        manifest: The manifest, to compare it with that of a step that exists if the request says
            so; None if parts of the step are elsewhere, so that it cannot be compared.

    Raises:
        SaveSkippedError: The step exists, and holds the same data.
        StepExistsError: The step exists, and differs or was not compared.
    """
    attempt = await session.opened()
    with session.hooks.watch.taking("published"):
        try:
            await session.storage.publish(
                attempt, overwrite=request.replaces_any, files=session.sizes
            )
        except StepExistsError as error:
            if request.if_exists != "equal" or manifest is None:
                raise
            raise await _compared(session.storage, request, manifest) from error
    session.attempt = None


async def _compared(
    storage: Storage, request: SaveRequest, manifest: Manifest
) -> SaveSkippedError | StepExistsError:
    """Return the error for a step that exists already: skipped if it holds the same data."""
    where = f"{storage.location}/{request.step_dir}"
    try:
        there = await read_manifest(storage, request.step_dir)
        differs = await run_in_thread(how_items_differ, there, manifest)
    except CheckpointError as error:
        what = f"{where} already exists, and what it holds cannot be compared: {error.message}"
        return step_exists(what, request.step)
    if differs:
        return step_exists(f"{where} already exists and differs: {differs}", request.step)
    others = [name for name in ("metrics", "metadata") if _unlike(name, there, manifest)]
    stays = f"; its {' and '.join(others)} stay what they were" if others else ""
    return SaveSkippedError(f"it already holds the same{stays}")


def _unlike(name: str, there: Manifest, manifest: Manifest) -> bool:
    new = getattr(manifest, name)
    return new is not None and new != getattr(there, name)
