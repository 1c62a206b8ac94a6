"""The step manifest: merges the reports of all processes, and describes the step."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import anyio

from ckpt._engine.engine import Engine
from ckpt._engine.save.merged_items import merge_processes
from ckpt._engine.save.multihost.save_report import SaveReport, same_items
from ckpt._engine.save.save_request import SaveRequest
from ckpt._engine.save.session import SaveSession
from ckpt._format.digests import digest
from ckpt._format.manifest import ItemEntry, Manifest, encode, features, sizes
from ckpt._format.manifest_head import FILE_NAME, FORMAT_VERSION, MAX_BYTES, FileEntry
from ckpt._plan.multihost.per_process import apart, combine
from ckpt._plan.orbax_view import step_view, text_view, why_hidden
from ckpt._runtime.tasks import for_each
from ckpt._runtime.threads import run_in_thread
from ckpt.errors import InvalidArgumentError, located
from ckpt.handlers._base import is_per_process

logger = logging.getLogger("ckpt")


def own_report(session: SaveSession, entries: Mapping[str, ItemEntry]) -> SaveReport:
    """Return the report of this process for the primary."""
    own_disks = session.processes.own_disks
    reported = {}
    for name, entry in entries.items():
        own = is_per_process(session.engine.handlers.named(entry.handler, name))
        # The primary has its own entries of the items that all processes have in common.
        reported[name] = entry if own and not own_disks else ItemEntry(handler=entry.handler)
    trees = {name: tree.for_primary() for name, tree in session.trees.items()}
    return SaveReport(reported, trees, {} if own_disks else session.files)


async def merge_entries(
    session: SaveSession,
    entries: Mapping[str, ItemEntry],
    reports: Sequence[SaveReport],
) -> dict[str, ItemEntry]:
    """Return the entries of the items over the chunks of all processes; write their indexes."""
    if session.processes.is_alone:
        return dict(entries)
    same_items(reports)
    found, files = await run_in_thread(
        merge_processes, entries, session.trees, reports, session.created_ns
    )
    for name, entry in entries.items():
        if is_per_process(session.engine.handlers.named(entry.handler, name)):
            with located(item=name):
                found[name] = combine([report.entries[name] for report in reports])
    for report in reports[1:]:
        session.files.update(report.files)
    await for_each(lambda path: session.write(path, files[path]), files)
    return found


def own_entries(session: SaveSession, entries: Mapping[str, ItemEntry]) -> dict[str, ItemEntry]:
    """Return the entries of a process with a private disk."""
    group = session.processes.group
    return {
        name: apart(entry, group.index, group.count)
        if is_per_process(session.engine.handlers.named(entry.handler, name))
        else entry
        for name, entry in entries.items()
    }


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
    more: Mapping[str, bytes] | None = None,
) -> Manifest:
    """Write the rest of the Orbax view, then the manifest; all of it is durable on return.

    `more` are other files that are written with it, by path.
    """
    if not entries:
        # A step without items could not be read.
        raise InvalidArgumentError("there is no item to save: a step has at least one")
    attempt = await session.opened()
    engine = session.engine
    committed_ns = engine.now_ns() if request.times_ns is None else request.times_ns[1]
    files: dict[str, bytes] = dict(more or {})
    # No view with private disks: Orbax would read zeros for the chunks on other disks.
    if not session.processes.own_disks:
        files |= step_view(
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
    for each in engine.extensions if not session.processes.is_alone else ():
        each.merged(entries)
    async with anyio.create_task_group() as writers:
        for path, data in files.items():
            known = session.files[path] = FileEntry(size=len(data), digest=digest(data))
            writers.start_soon(session.write, path, data, known)
        manifest = Manifest(
            format="ckpt",
            version=FORMAT_VERSION,
            requires=features(entries, attempt.folder, own_disks=session.processes.own_disks),
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
            process_count=session.processes.group.count,
            save=session.save if session.processes.own_disks else "",
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
