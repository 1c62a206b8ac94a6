"""The step manifest: describes the step, and is written last."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import anyio

from ckpt._engine.engine import Engine
from ckpt._engine.save.save_request import SaveRequest
from ckpt._engine.save.session import SaveSession
from ckpt._format.digests import digest
from ckpt._format.manifest import ItemEntry, Manifest, encode, features, sizes
from ckpt._format.manifest_head import FILE_NAME, FORMAT_VERSION, MAX_BYTES, PART_FILE, FileEntry
from ckpt._plan.orbax_view import step_view, text_view, why_hidden
from ckpt._runtime.threads import run_in_thread
from ckpt.errors import InvalidArgumentError

logger = logging.getLogger("ckpt")


def _warn_of_hidden(engine: Engine, entries: Mapping[str, ItemEntry]) -> None:
    """Warn of items that Orbax cannot read, once for each."""
    for name, entry in entries.items():
        why = why_hidden(entry)
        if why and (name, why) not in engine.plans.hidden:
            engine.plans.hidden.add((name, why))
            logger.warning(
                "Orbax cannot read the item %r: %s. This library reads all of it", name, why
            )


async def write_manifest(
    session: SaveSession,
    request: SaveRequest,
    entries: Mapping[str, ItemEntry],
    part: bytes | None = None,
) -> Manifest:
    """Write the rest of the Orbax view, then the manifest; all of it is durable on return.

    `part` is the part file of a private disk. It replaces the view: Orbax would read zeros for the
    chunks on other disks.
    """
    if not entries:
        # A step without items could not be read.
        raise InvalidArgumentError("there is no item to save: a step has at least one")
    attempt = await session.opened()
    engine = session.engine
    committed_ns = engine.now_ns() if request.times_ns is None else request.times_ns[1]
    if part is not None:
        files = {PART_FILE: part}
    else:
        files = step_view(
            request.step_dir,
            entries,
            request.metrics,
            request.metadata,
            session.created_ns,
            committed_ns,
            session.files,
            in_store=bool(attempt.folder),
        )
        for name, entry in entries.items():
            texts = await run_in_thread(text_view, entry)
            files.update({f"{name}/{path}": data for path, data in texts.items()})
        _warn_of_hidden(engine, entries)
    async with anyio.create_task_group() as writers:
        for path, data in files.items():
            known = session.files[path] = FileEntry(size=len(data), digest=digest(data))
            writers.start_soon(session.write, path, data, known)
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
        )
        encoded = await run_in_thread(encode_manifest, manifest)
    await session.storage.write(attempt, FILE_NAME, encoded)
    session.sizes = sizes(manifest, encoded)
    return manifest


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
