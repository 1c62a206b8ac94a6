"""The recovery of a job's newest whole snapshot: the places of its parts, and who fetches. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from ckpt._tiers.peers.parts import SnapshotPart


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
