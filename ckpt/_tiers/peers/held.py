"""The removal of parts that are held for other processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ckpt._runtime.threads import run_in_thread
from ckpt._settings import Timeouts
from ckpt._tiers.peers.parts import held_by, snapshots_in
from ckpt.storage._local.storage import LocalStorage

# Memory is read by its owner alone.
PRIVATE = 0o700


def storage_of(place: Path) -> LocalStorage:
    """Return a root for parts."""
    return LocalStorage(place, Timeouts(), mode=PRIVATE)


def has_held(folder: Path, goes: Callable[[int, int], bool]) -> bool:
    """Tell whether `remove_held` would remove anything. Blocks."""
    return any(
        goes(part, each.step) for part, root in held_by(folder) for each in snapshots_in(root)
    )


async def remove_held(folder: Path, goes: Callable[[int, int], bool]) -> None:
    """Remove parts that are held in a folder: those whose process and step `goes` tells.

    Raises:
        StorageError: The system refused.
    """
    for part, root in await run_in_thread(lambda: list(held_by(folder))):
        storage = storage_of(root)
        for each in await run_in_thread(snapshots_in, root):
            if goes(part, each.step):
                await storage.remove(each.step_dir)
