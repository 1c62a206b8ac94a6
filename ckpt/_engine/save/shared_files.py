"""Shared files: files of the step before that a save reuses instead of writing their bytes."""

from __future__ import annotations

import anyio
from msgspec.structs import replace

from ckpt._engine.base_step import RestoredItem, SavedItem
from ckpt._engine.save.session import SaveSession
from ckpt._plan.item_reports import ItemReport
from ckpt._plan.save_plan import SavePlan
from ckpt._runtime.threads import run_in_thread

# Most time that a caller of save() waits for work that lets it return sooner.
_PATIENCE_SECONDS = 0.05


async def base_item(session: SaveSession, item: str, plan: SavePlan) -> SavedItem | None:
    """Return the item of the step before, if its tree had the same plan; else None.

    `plan` is the plan for all of its chunks.
    """
    known = None if session.last is None else session.last.items.get(item)
    if isinstance(known, RestoredItem):
        return await run_in_thread(known.as_saved, plan)
    return known if known is not None and known.plan is plan else None


async def reuse_files(
    session: SaveSession, item: str, known: SavedItem, wanted: ItemReport
) -> ItemReport | None:
    """Put files of the step before into the attempt.

    Args:
        session: The save.
        item: Name of the item.
        known: The item of the step before.
        wanted: The chunks of it to reuse, as a report; covers all chunks needed from their files.

    Returns:
        The part of `wanted` that is in the attempt now; None for nothing. The rest is to be
        written.
    """
    assert session.last is not None
    damaged = session.engine.damaged
    paths = {full: path for path in wanted.files if (full := f"{item}/{path}") not in damaged}
    # The attempt is begun while the tree is planned. In a job another process begins it, and a
    # process that comes late must not delay the callers in all others.
    with anyio.move_on_after(_PATIENCE_SECONDS):
        await session.begun.wait()
    if session.attempt is None:
        return None
    # Two batches may want the same file.
    awaited = [session.sharing[full] for full in paths if full in session.sharing]
    missing = {
        full: known.files[path].size
        for full, path in paths.items()
        if full not in session.files and full not in session.sharing
    }
    if missing:
        is_over = anyio.Event()
        session.sharing.update(dict.fromkeys(missing, is_over))
        try:
            shared = await session.storage.share(session.attempt, session.last.step_dir, missing)
            for full in shared:
                session.files[full] = replace(known.files[paths[full]], shared=True)
        finally:
            for full in missing:
                del session.sharing[full]
            is_over.set()
    for each in awaited:
        await each.wait()
    found = {path for full, path in paths.items() if full in session.files}
    return wanted.in_files(found) if found else None
