"""Plans of the reads of an item by every process, made by the planner of restores."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from ckpt._format.leaf_table import LeafEntry
from ckpt._format.regions import Region
from ckpt._inspection.restores.device_grid import HeldPart
from ckpt._inspection.restores.placements import HeldParts
from ckpt._plan.chunk_reads import ReadRequest, plan_chunk_reads, plan_requests
from ckpt._plan.slices.array_slices import ArraySlice

Shape = tuple[int, ...]


class WantedArray(Struct, frozen=True):
    """An array to restore.

    Attributes:
        path: Its leaf path.
        number: Number of the stored leaf; for one array at several places, of the first.
        leaf: The leaf.
        held: The part of each process.
    """

    path: str
    number: int
    leaf: LeafEntry
    held: HeldParts


class WantedItem(Struct, frozen=True):
    """An item to restore.

    Attributes:
        name: Its name.
        leaves: All of its stored leaves.
        arrays: The arrays to restore.
        data_files: Its data files, relative to the step.
    """

    name: str
    leaves: Sequence[LeafEntry]
    arrays: Sequence[WantedArray]
    data_files: Sequence[str]


class NeededRegions(Struct, frozen=True, gc=False):
    """The regions of a stored leaf that a process needs, in the form that the planner expects."""

    shape: Shape
    leaf: int | None
    regions: tuple[Region, ...]
    pieces: tuple[ArraySlice, ...] = ()


def requests_of(item: WantedItem, process: int, limit: int) -> list[ReadRequest]:
    """Return the requests of a process for an item, in the order of a restore.

    Args:
        item: The item.
        process: Number of the process.
        limit: Most bytes of a coalesced request.

    Raises:
        TargetMismatchError: A chunk is on the disk of another process.
    """
    needed = [
        NeededRegions(tuple(each.leaf.shape), each.number, each.held.parts[process].regions)
        for each in item.arrays
    ]
    return plan_requests(plan_chunk_reads(item.leaves, needed), item.data_files, limit)


def alike(items: Sequence[WantedItem], processes: int) -> list[list[int]]:
    """Return the processes in groups that need the same parts of all arrays."""
    groups: dict[tuple[int, ...], list[int]] = {}
    # Equal parts get one number each, so that keys of many processes and arrays compare fast.
    numbers: dict[HeldPart, int] = {}
    known: dict[int, int] = {}
    placements = {id(array.held): array.held for item in items for array in item.arrays}
    for process in range(processes):
        key = []
        for held in placements.values():
            part = held.parts[process]
            if id(part) not in known:
                known[id(part)] = numbers.setdefault(part, len(numbers))
            key.append(known[id(part)])
        groups.setdefault(tuple(key), []).append(process)
    return list(groups.values())
