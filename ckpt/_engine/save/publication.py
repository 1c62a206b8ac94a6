"""How a save becomes visible: published by one process for all, or by each on a private disk."""

from __future__ import annotations

from collections.abc import Mapping

import anyio

from ckpt._engine.engine import Engine
from ckpt._engine.save.joint.multihost import MultihostSave, SoloSave
from ckpt._engine.save.joint.part_file import part_file
from ckpt._engine.save.joint.write_report import same_items
from ckpt._engine.save.merged_items import check_alike
from ckpt._engine.save.request import SaveRequest
from ckpt._engine.save.session import SaveSession
from ckpt._engine.save.step_manifest import merge_entries, own_entries, own_report, write_manifest
from ckpt._format.manifest import ItemEntry, Manifest
from ckpt._format.step_files.step_part import PART_FILE
from ckpt._runtime.threads import run_in_thread


async def publish(
    session: SaveSession,
    engine: Engine,
    request: SaveRequest,
    entries: Mapping[str, ItemEntry],
) -> Manifest:
    """Write the manifest over items that are durable, and publish the step.

    Returns:
        The manifest; where another process has published, without its leaves and files.
    """
    # A process that cannot write to the attempt must not report, not even that it wrote nothing.
    await session.opened()
    processes = session.processes
    if isinstance(processes, SoloSave):
        return await _publish_alone(session, engine, request, entries)
    if processes.own_disks:
        return await _publish_apart(processes, session, engine, request, entries)
    return await _publish_together(processes, session, engine, request, entries)


async def _publish_alone(
    session: SaveSession,
    engine: Engine,
    request: SaveRequest,
    entries: Mapping[str, ItemEntry],
) -> Manifest:
    with session.recorder.phase("record"), session.hooks.watch.taking("merged"):
        entries = await merge_entries(
            session, engine.handlers, entries, [own_report(session, engine, entries)]
        )
        manifest = await write_manifest(session, engine, request, entries)
    with session.recorder.phase("publish"), anyio.CancelScope(shield=True):
        await _give_name(session, request)
    return manifest


async def _publish_together(
    processes: MultihostSave,
    session: SaveSession,
    engine: Engine,
    request: SaveRequest,
    entries: Mapping[str, ItemEntry],
) -> Manifest:
    """Tell the primary what was written; it writes the manifest over all of it, and publishes."""
    with session.recorder.phase("record"), session.hooks.watch.taking("merged"):
        reports = await processes.report(own_report(session, engine, entries))
        if reports is not None:
            async with processes.busy():
                entries = await merge_entries(session, engine.handlers, entries, reports)
                manifest = await write_manifest(session, engine, request, entries)
            # From here on no other process can make the save fail.
            await processes.decide()
    with session.recorder.phase("publish"):
        if reports is None:
            return await processes.outcome()
        with anyio.CancelScope(shield=True):
            async with processes.busy():
                await _give_name(session, request)
            await processes.conclude(manifest)
    return manifest


async def _publish_apart(
    processes: MultihostSave,
    session: SaveSession,
    engine: Engine,
    request: SaveRequest,
    entries: Mapping[str, ItemEntry],
) -> Manifest:
    """Write a manifest over what this process has written, and publish it when all are ready.

    If one process fails to publish after others have, all hear of it, and what those others have
    does not count as a step, since not all processes have it.
    """
    with session.recorder.phase("record"), session.hooks.watch.taking("merged"):
        async with processes.busy():
            part = await run_in_thread(part_file, session, engine.handlers, entries)
            entries = own_entries(session, engine.handlers, entries)
            manifest = await write_manifest(session, engine, request, entries, {PART_FILE: part})
        reports = await processes.report(own_report(session, engine, entries))
        if reports is not None:
            same_items(reports)
            async with processes.busy():
                await run_in_thread(check_alike, session.trees, reports)
    with session.recorder.phase("publish"):
        await processes.ready()
        # Until all have published: a step counts only if all processes have it.
        with anyio.CancelScope(shield=True):
            async with processes.busy():
                await _give_name(session, request)
            await processes.published()
    return manifest


async def _give_name(session: SaveSession, request: SaveRequest) -> None:
    """Publish the attempt; shielded by the callers.

    A cancellation between the store's act and our knowing of it would remove a published step.
    """
    with session.hooks.watch.taking("published"):
        await session.storage.publish(
            await session.opened(), overwrite=request.overwrite, files=session.sizes
        )
    session.attempt = None
