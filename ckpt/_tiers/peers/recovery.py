"""Where the parts of the newest whole snapshot of a job are, and who fetches what. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from ckpt._tiers.peers.parts import SnapshotPart


class Inventory(Struct, frozen=True):
    """What one process says when a job starts.

    Attributes:
        machine: Which machine it runs on.
        address: The address that its keeper listens at.
        problem: Why it cannot take part; empty if it can.
        parts: The parts of snapshots that it finds on its host.
    """

    machine: str
    address: str
    problem: str = ""
    parts: tuple[SnapshotPart, ...] = ()


class Recovery(Struct, frozen=True):
    """How a job gets at its newest snapshot.

    Attributes:
        step: The snapshot; -1 if no snapshot is whole.
        save: `Manifest.save` of it.
        fetches: By process that lacks its part, the process that has it.
    """

    step: int = -1
    save: str = ""
    fetches: dict[int, int] = {}


def recovery_of(processes: Sequence[Inventory]) -> Recovery:
    """Return the newest snapshot of which all parts are somewhere, and how they get to their place.

    A process that lacks its part fetches it from its own host, if that has it: from where a process
    with another number kept it. Otherwise from the process that has the least to do.
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
    """Return how far a process and the one that holds its copies are apart.

    The least distance at which they are on two machines as often as possible.
    """
    count = len(machines)

    def on_one(distance: int) -> int:
        return sum(machines[i] == machines[(i + distance) % count] for i in range(count))

    best, fewest = 1, count
    # Farther ones are as far as these, the other way round.
    for distance in range(1, count // 2 + 1):
        same = on_one(distance)
        if same < fewest:
            best, fewest = distance, same
        if not same:
            # Where all of a machine are neighbours, at as many as a machine has.
            break
    return best


def why_not(processes: Sequence[Inventory], is_loopback: Sequence[bool]) -> str:
    """Return why a job cannot hold copies on its peers; empty if it can."""
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
