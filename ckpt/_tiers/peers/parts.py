"""The parts of snapshots that a host has: its own, and those that it holds for other processes.

KEY/steps/STEP            the part of a snapshot that this process has saved KEY/held/PART/STEP
a copy of the part that process PART has saved
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from ckpt._format.manifest_head import FILE_NAME, HEAD_BYTES, peek
from ckpt._runtime.threads import run_in_thread
from ckpt._settings import Timeouts
from ckpt.storage._local.config import Local
from ckpt.storage._local.leases import is_unfinished
from ckpt.storage._local.storage import LocalStorage

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


class Inventory(Struct, frozen=True):
    """The report of one process when a job starts.

    Attributes:
        machine: Id of its machine.
        address: The address at which its agent listens.
        problem: Reason why it cannot take part; empty if it can.
        parts: The parts of snapshots on its host.
    """

    machine: str
    address: str
    problem: str = ""
    parts: tuple[SnapshotPart, ...] = ()


class Recovery(Struct, frozen=True):
    """The way in which a job gets its newest snapshot.

    Attributes:
        step: The snapshot; -1 if no snapshot is whole.
        save: Its `Manifest.save`.
        fetches: By process that lacks its part, the process that has it.
    """

    step: int = -1
    save: str = ""
    fetches: dict[int, int] = {}


def recovery_of(processes: Sequence[Inventory]) -> Recovery:
    """Return the newest snapshot that has all parts on some hosts, and the fetches for it.

    A process that lacks its part fetches it from its own host if that has it: there, a process with
    another number kept it. Otherwise it fetches from the process with the fewest others to serve.
    """
    where: dict[tuple[int, str], dict[int, list[int]]] = {}
    at_home: set[tuple[int, str, int]] = set()
    for process, inventory in enumerate(processes):
        for each in inventory.parts:
            holders = where.setdefault((each.step, each.save), {}).setdefault(each.part, [])
            if process not in holders:
                holders.append(process)
            if each.is_own and each.part == process:
                at_home.add((each.step, each.save, process))
    count = len(processes)
    whole = [key for key, parts in where.items() if all(part in parts for part in range(count))]
    if not whole:
        return Recovery()
    step, save = max(whole)
    given = Counter[int]()
    fetches = {}
    for process in range(count):
        if (step, save, process) in at_home:
            continue
        holders = where[step, save][process]
        source = (
            process if process in holders else min(holders, key=lambda each: (given[each], each))
        )
        given[source] += 1
        fetches[process] = source
    return Recovery(step, save, fetches)


def distance_between(machines: Sequence[str]) -> int:
    """Return the distance between a process and the one that holds its copies.

    This is the least distance at which the two are on different machines as often as possible.
    """
    count = len(machines)

    def on_one(distance: int) -> int:
        return sum(machines[i] == machines[(i + distance) % count] for i in range(count))

    best, fewest = 1, count
    # Greater distances are the same as these in the other direction.
    for distance in range(1, count // 2 + 1):
        same = on_one(distance)
        if same < fewest:
            best, fewest = distance, same
        if not same:
            # With the processes of a machine next to each other, this is the number per machine.
            break
    return best


def why_not(processes: Sequence[Inventory], is_loopback: Sequence[bool]) -> str:
    """Return the reason why a job cannot hold copies on its peers; empty if it can."""
    for process, each in enumerate(processes):
        if each.problem:
            return f"process {process}: {each.problem}"
    machines = len({each.machine for each in processes})
    if machines > 1 and any(is_loopback):
        process = list(is_loopback).index(True)
        return (
            f"the job runs on {machines} machines, and process {process} listens at "
            f"{processes[process].address}, where no other machine can reach it: give "
            "PeerCopies(address=...) the address of this machine in the network of the job"
        )
    return ""
