"""The removal of parts that are held for other processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ckpt._runtime.threads import run_in_thread
from ckpt._settings import Timeouts
from ckpt._tiers.peers.parts import replica_roots, snapshots_in
from ckpt.storage._local.config import Local
from ckpt.storage._local.storage import LocalStorage

# Mode of the folders: memory is read by its owner alone.
PRIVATE = 0o700


def replica_storage(place: Path) -> LocalStorage:
    return LocalStorage(Local(place, permission_mode=PRIVATE), Timeouts())


def has_replicas(folder: Path, goes: Callable[[int, int], bool]) -> bool:
    """Return True if `remove_replicas` would remove anything. Blocks."""
    return any(
        goes(part, each.step) for part, root in replica_roots(folder) for each in snapshots_in(root)
    )


async def remove_replicas(folder: Path, goes: Callable[[int, int], bool]) -> None:
    """Remove the held parts in a folder for which `goes` (of process and step) is true.

    Raises:
        StorageError: The system refused.
    """
    for part, root in await run_in_thread(lambda: list(replica_roots(folder))):
        storage = replica_storage(root)
        for each in await run_in_thread(snapshots_in, root):
            if goes(part, each.step):
                await storage.remove(each.step_dir)
