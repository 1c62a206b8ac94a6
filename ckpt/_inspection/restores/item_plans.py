"""Plans of an item: what every process would read of it. The planner is that of restores."""

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
    """An array that is restored.

    Attributes:
        path: Its leaf path.
        number: Number of the stored leaf; of one array at several places, that of the first.
        leaf: The leaf.
        held: What each process would hold of it.
    """

    path: str
    number: int
    leaf: LeafEntry
    held: HeldParts


class WantedItem(Struct, frozen=True):
    """An item that is restored.

    Attributes:
        name: Its name.
        leaves: All leaves that are stored.
        arrays: Those that are wanted.
        data_files: Its data files, relative to the step.
    """

    name: str
    leaves: Sequence[LeafEntry]
    arrays: Sequence[WantedArray]
    data_files: Sequence[str]


class NeededRegions(Struct, frozen=True, gc=False):
    """The regions of a stored leaf that a process needs: what the planner asks of an array."""

    shape: Shape
    leaf: int | None
    regions: tuple[Region, ...]
    pieces: tuple[ArraySlice, ...] = ()


def requests_of(item: WantedItem, process: int, limit: int) -> list[ReadRequest]:
    """Return what a process would read of an item, in the order of a restore.

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
    """Return the processes in groups of those that need the same of all arrays."""
    groups: dict[tuple[int, ...], list[int]] = {}
    # Equal parts get one number each, since there are many processes and arrays.
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
