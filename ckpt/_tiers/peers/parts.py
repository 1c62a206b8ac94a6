"""The parts of snapshots that a host has: its own, and those that it holds for other processes.

KEY/steps/STEP            the part of a snapshot that this process has saved
KEY/held/PART/STEP        a copy of the part that process PART has saved
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct

from ckpt._format.manifest_head import FILE_NAME, HEAD_BYTES, peek
from ckpt._runtime.threads import run_in_thread
from ckpt._settings import Timeouts
from ckpt.storage._local.config import Local
from ckpt.storage._local.storage import LocalStorage
from ckpt.storage._local.sweep import is_unfinished

STEPS, REPLICAS = "steps", "held"
# Mode of the folders: memory is read by its owner alone.
PRIVATE = 0o700


class Snapshot(Struct, frozen=True, order=True):
    """A step of a root in memory.

    Attributes:
        step: Its number.
        step_dir: Its directory.
        save: Its `Manifest.save`, which all its parts share.
    """

    step: int
    step_dir: str
    save: str


class SnapshotPart(Struct, frozen=True):
    """The part of a snapshot that one process has saved, on some host.

    Attributes:
        part: Number of that process.
        step: The snapshot.
        save: Its `Manifest.save`.
        is_own: True if it is where that process saves.
    """

    part: int
    step: int
    save: str
    is_own: bool


def snapshots_in(steps: Path) -> list[Snapshot]:
    """Return the steps of a root in memory, the newest first. Blocks."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for each in os.scandir(steps):
            if is_unfinished(each.name):
                continue
            with contextlib.suppress(OSError), open(Path(each.path, FILE_NAME), "rb") as file:
                head = peek(file.read(HEAD_BYTES))
                if head is not None and head.step is not None:
                    found.append(Snapshot(head.step, each.name, head.save))
    return sorted(found, reverse=True)


def part_places(folder: Path, process: int) -> Iterator[tuple[SnapshotPart, Path]]:
    """Yield the parts in the folder of a process, with their paths. Blocks."""
    for part, root in [(process, folder / STEPS), *replica_roots(folder)]:
        is_own = root.name == STEPS
        for each in snapshots_in(root):
            if each.save:
                yield SnapshotPart(part, each.step, each.save, is_own), root / each.step_dir


def replica_roots(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield the processes whose parts are in the folder, with the root of these. Blocks."""
    with contextlib.suppress(FileNotFoundError):
        for each in sorted((folder / REPLICAS).iterdir()):
            if each.name.isdecimal():
                yield int(each.name), each


def replica_root(folder: Path, part: int) -> Path:
    return folder / REPLICAS / str(part)


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
