"""How a save becomes visible: by one process for all, or by each on a disk of its own."""

from __future__ import annotations

from collections.abc import Mapping

import anyio

from ckpt._engine.engine import Engine
from ckpt._engine.save.merged_items import check_alike
from ckpt._engine.save.multihost import same_items
from ckpt._engine.save.request import SaveRequest
from ckpt._engine.save.session import SaveSession
from ckpt._engine.save.step_manifest import (
    joined,
    own_entries,
    own_report,
    record,
)
from ckpt._format.manifest import ItemEntry, Manifest

__all__ = ["end_apart", "end_together"]


async def end_together(
    session: SaveSession,
    engine: Engine,
    request: SaveRequest,
    entries: Mapping[str, ItemEntry],
) -> Manifest:
    """Tell the primary what was written; it writes the manifest over all of it, and publishes."""
    joint, watch = session.joint, session.hooks.watch
    # Who cannot write to the attempt must not report, not even that it has written nothing.
    await session.opened()
    with session.recorder.phase("record"), watch.taking("merged"):
        reports = await joint.report(own_report(session, engine, entries))
        if reports is not None:
            async with joint.busy():
                entries = await joined(session, engine.handlers, entries, reports)
                manifest = await record(session, engine, request, entries)
            # From here on no other process can make the save fail.
            await joint.decide()
    with session.recorder.phase("publish"):
        if reports is None:
            return await joint.outcome()
        # From here to the end nothing may come between the store and our knowing what it did.
        with anyio.CancelScope(shield=True):
            async with joint.busy():
                await _publish(session, request)
            await joint.conclude(manifest)
    return manifest


async def end_apart(
    session: SaveSession,
    engine: Engine,
    request: SaveRequest,
    entries: Mapping[str, ItemEntry],
) -> Manifest:
    """Write a manifest over what this process has written, and publish it when all are ready.

    A process may fail to publish when others have: their step then is not one, since not all have
    it. All hear of it.
    """
    joint, watch = session.joint, session.hooks.watch
    with session.recorder.phase("record"), watch.taking("merged"):
        entries = own_entries(session, engine.handlers, entries)
        async with joint.busy():
            manifest = await record(session, engine, request, entries)
        reports = await joint.report(own_report(session, engine, entries))
        if reports is not None:
            same_items(reports)
            async with joint.busy():
                await anyio.to_thread.run_sync(check_alike, session.trees, reports)
    with session.recorder.phase("publish"):
        await joint.ready()
        # Also until all have: what is on some disks only is no step.
        with anyio.CancelScope(shield=True):
            async with joint.busy():
                await _publish(session, request)
            await joint.published()
    return manifest


async def _publish(session: SaveSession, request: SaveRequest) -> None:
    with session.hooks.watch.taking("published"):
        await session.storage.publish(await session.opened(), overwrite=request.overwrite)
    session.attempt = None
