"""Shared files: those of the step before that a save takes over instead of writing their bytes."""

from __future__ import annotations

from msgspec.structs import replace

from ckpt._engine.last_save import RestoredItem, SavedItem
from ckpt._engine.save.session import SaveSession
from ckpt._plan.item_reports import ItemReport
from ckpt._plan.save_plan import SavePlan
from ckpt._plan.unchanged.kept_chunks import in_files
from ckpt._runtime.threads import run_in_thread
from ckpt.storage._base import SharesFiles


async def known_item(session: SaveSession, item: str, plan: SavePlan) -> SavedItem | None:
    """Return the item as the step before has it, if files of that can be taken over.

    Args:
        session: The save.
        item: Name of the item.
        plan: The plan for all its chunks.
    """
    known = None if session.last is None else session.last.items.get(item)
    if known is None or not isinstance(session.storage, SharesFiles):
        return None
    if isinstance(known, RestoredItem):
        return await run_in_thread(known.as_saved, plan)
    return known if known.plan is plan else None


async def take_over(
    session: SaveSession, item: str, known: SavedItem, wanted: ItemReport
) -> ItemReport | None:
    """Put files of the step before into the attempt.

    Args:
        session: The save.
        item: Name of the item.
        known: The item as the step before has it.
        wanted: Which of its chunks are to be taken over; all that they need of their files.

    Returns:
        What of it is in the attempt now; None for nothing. The rest is to be written.
    """
    assert session.last is not None
    assert isinstance(session.storage, SharesFiles)
    paths = {f"{item}/{path}": path for path in wanted.files}
    await session.begun.wait()
    assert session.attempt is not None
    # Two batches may want the same file.
    async with session.sharing:
        missing = {
            full: known.files[path].size
            for full, path in paths.items()
            if full not in session.files
        }
        if missing:
            shared = await session.storage.share(session.attempt, session.last.step_dir, missing)
            for full in shared:
                session.files[full] = replace(known.files[paths[full]], shared=True)
    found = {path for full, path in paths.items() if full in session.files}
    return in_files(wanted, found) if found else None
