"""Publication: a save becomes visible, by one process for all, or by each on a private disk."""

from __future__ import annotations

from collections.abc import Mapping

import anyio

from ckpt._engine.save.merged_items import check_alike
from ckpt._engine.save.multihost.multihost_save import MultihostSave, SoloSave
from ckpt._engine.save.multihost.part_file import part_file
from ckpt._engine.save.multihost.save_report import same_items
from ckpt._engine.save.save_request import SaveRequest, step_exists
from ckpt._engine.save.session import SaveSession
from ckpt._engine.save.step_manifest import merge_entries, own_entries, own_report, write_manifest
from ckpt._format.manifest import ItemEntry, Manifest
from ckpt._format.step_files.step_part import PART_FILE
from ckpt._plan.unchanged.compared_leaves import how_items_differ
from ckpt._runtime.threads import run_in_thread
from ckpt.errors import CheckpointError, SaveSkippedError, StepExistsError
from ckpt.storage._base import Storage
from ckpt.storage._manifests import read_manifest


async def publish(
    session: SaveSession,
    request: SaveRequest,
    entries: Mapping[str, ItemEntry],
) -> Manifest:
    """Write the manifest over items that are durable, and publish the step.

    Returns:
        The manifest; if another process has published, without its leaves and files.
    """
    # A process that cannot write to the attempt must not report, not even an empty report.
    await session.opened()
    processes = session.processes
    if isinstance(processes, SoloSave):
        return await _publish_alone(session, request, entries)
    if processes.own_disks:
        return await _publish_apart(processes, session, request, entries)
    return await _publish_together(processes, session, request, entries)


async def _publish_alone(
    session: SaveSession,
    request: SaveRequest,
    entries: Mapping[str, ItemEntry],
) -> Manifest:
    with session.recorder.phase("record"), session.hooks.watch.taking("merged"):
        entries = await merge_entries(session, entries, [own_report(session, entries)])
        manifest = await write_manifest(session, request, entries)
    with session.recorder.phase("publish"), anyio.CancelScope(shield=True):
        await _give_name(session, request, manifest)
    return manifest


async def _publish_together(
    processes: MultihostSave,
    session: SaveSession,
    request: SaveRequest,
    entries: Mapping[str, ItemEntry],
) -> Manifest:
    """Report to the primary, which writes the manifest over all reports, and publishes."""
    with session.recorder.phase("record"), session.hooks.watch.taking("merged"):
        reports = await processes.report(own_report(session, entries))
        if reports is not None:
            async with processes.busy():
                entries = await merge_entries(session, entries, reports)
                manifest = await write_manifest(session, request, entries)
            # From here on no other process can make the save fail.
            await processes.decide()
    with session.recorder.phase("publish"):
        if reports is None:
            return await processes.outcome()
        with anyio.CancelScope(shield=True):
            async with processes.busy():
                await _give_name(session, request, manifest)
            await processes.conclude(manifest)
    return manifest


async def _publish_apart(
    processes: MultihostSave,
    session: SaveSession,
    request: SaveRequest,
    entries: Mapping[str, ItemEntry],
) -> Manifest:
    """Write a manifest over the chunks of this process, and publish it when all are ready.

    If one process fails to publish after others have, all get its error. The published parts do not
    count as a step then, since not all processes have it.
    """
    with session.recorder.phase("record"), session.hooks.watch.taking("merged"):
        async with processes.busy():
            part = await run_in_thread(part_file, session, entries)
            entries = own_entries(session, entries)
            manifest = await write_manifest(session, request, entries, {PART_FILE: part})
        reports = await processes.report(own_report(session, entries))
        if reports is not None:
            same_items(reports)
            async with processes.busy():
                await run_in_thread(check_alike, session.trees, reports)
    with session.recorder.phase("publish"):
        await processes.ready()
        # Shielded until all have published: a step counts only if all processes have it.
        with anyio.CancelScope(shield=True):
            async with processes.busy():
                await _give_name(session, request, manifest)
            await processes.published()
    return manifest


async def _give_name(session: SaveSession, request: SaveRequest, manifest: Manifest) -> None:
    """Publish the attempt; shielded by the callers.

    A cancellation after the store has published, and before we know of it, would remove a published
    step.
    """
    attempt = await session.opened()
    with session.hooks.watch.taking("published"):
        try:
            await session.storage.publish(
                attempt, overwrite=request.replaces_any, files=session.sizes
            )
        except StepExistsError as error:
            if request.if_exists != "equal" or session.processes.own_disks:
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
