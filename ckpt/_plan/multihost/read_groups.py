"""Bytes that several processes need, dealt out so that the job reads each once. Pure.

Processes whose devices hold the same shards of an array need the same chunks of it. They are a
group, and what they need of the data files is one stream of bytes, worked out on each of them from
what is the same on all. The stream is cut into batches, and a batch into as many shares as the
group has members. Each member reads its share; then all of them exchange.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import jax

from ckpt._format.digests import digest
from ckpt._plan.ownership import held_by
from ckpt._plan.targets import ArrayRead

__all__ = [
    "BatchRead",
    "ByteRange",
    "Grouping",
    "Groupings",
    "ReadBatch",
    "fill",
    "groupings_of",
    "shares_key",
]

Shape = tuple[int, ...]

# What lies between two extents is read with them if it is not more than the padding of chunks.
MOST_SKIPPED = 4096


@dataclass(frozen=True, slots=True)
class Grouping:
    """The processes of a job by what they hold of an array.

    Attributes:
        groups: The numbers of the processes of each group, ascending. All groups have equally many
            members, two or more, and every process is in one.
        devices: For every process, by its number, those of its devices that hold something.
    """

    groups: tuple[tuple[int, ...], ...]
    devices: tuple[tuple[jax.Device, ...], ...] = field(compare=False)

    @property
    def members(self) -> int:
        """How many processes each group has."""
        return len(self.groups[0])

    @property
    def lanes(self) -> int:
        """How many devices every process has, at least."""
        return min(map(len, self.devices))

    @property
    def key(self) -> str:
        """The same on processes that mean the same processes, and devices."""
        ids = [[device.id for device in each] for each in self.devices]
        return digest(repr((self.groups, ids)).encode())

    def group_of(self, process: int) -> tuple[int, ...]:
        """Return the processes that hold the same as `process`, itself among them."""
        return next(group for group in self.groups if process in group)


@dataclass(slots=True)
class Groupings:
    """Finds the grouping of arrays; looks at every sharding once."""

    processes: int
    _by_identity: dict[int, tuple[object, Grouping | None]] = field(default_factory=dict)
    _known: dict[jax.sharding.Sharding, Grouping | None] = field(default_factory=dict)

    def of(self, read: ArrayRead) -> Grouping | None:
        """Return the grouping of an array, or None where there is nothing to share.

        That is an array of this process alone, one of which no two processes hold the same, and
        one on which not all processes of the job have equal claims.
        """
        sharding = read.target.sharding
        if sharding is None or sharding.is_fully_addressable or 0 in read.shape:
            return None
        known = self._by_identity.get(id(sharding))
        if known is None:
            # jax cuts arrays evenly, so that all arrays of a sharding are held in the same way.
            if sharding not in self._known:
                self._known[sharding] = _look(sharding, read.shape, self.processes)
            known = self._by_identity[id(sharding)] = sharding, self._known[sharding]
        return known[1]


def _look(sharding: jax.sharding.Sharding, shape: Shape, processes: int) -> Grouping | None:
    held = held_by(sharding, shape)
    if sorted(held) != list(range(processes)):
        return None
    alike: dict[frozenset[Shape], list[int]] = {}
    for process in range(processes):
        alike.setdefault(held[process], []).append(process)
    groups = tuple(map(tuple, alike.values()))
    sizes = set(map(len, groups))
    if len(sizes) > 1 or sizes == {1}:
        return None
    devices: list[list[jax.Device]] = [[] for _ in range(processes)]
    every: set[jax.Device] = sharding.device_set
    for device in sorted(every, key=lambda device: device.id):
        devices[device.process_index].append(device)
    return Grouping(groups, tuple(map(tuple, devices)))


def groupings_of(reads: Iterable[ArrayRead], processes: int) -> dict[int, Grouping]:
    """Return the stored leaves that are shared, by number, each with the grouping that needs it.

    A leaf that arrays of several groupings need is not among them: nobody could tell from its own
    part of them what the others need of it.
    """
    groupings = Groupings(processes)
    found: dict[int, Grouping | None] = {}
    for read in reads:
        leaves = {piece.leaf for piece in read.pieces} | ({read.leaf} - {None})
        if not leaves:
            continue
        grouping = groupings.of(read)
        for leaf in leaves:
            assert leaf is not None
            found[leaf] = grouping if found.get(leaf, grouping) == grouping else None
    return {leaf: grouping for leaf, grouping in found.items() if grouping is not None}


@dataclass(frozen=True, slots=True, order=True)
class ByteRange:
    """Bytes of a data file.

    Attributes:
        path: The file, relative to the item.
        start, end: Its first byte, and the one behind its last.
    """

    path: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class BatchRead:
    """A part of a batch that is read at once: `nbytes` from `start` of a file on go to `at`."""

    path: str
    start: int
    nbytes: int
    at: int


class ReadBatch:
    """Bytes that a group reads together, in the order in which they lie in the exchanged memory.

    Attributes:
        units: Numbers of the units whose bytes they are, from the first to the one behind the last.
        nbytes: How many there are.
    """

    def __init__(self, units: range, extents: Iterable[ByteRange]) -> None:
        """Take what `units` need; where that overlaps, or nearly touches, it is read once."""
        self.units = units
        self._extents = _merged(extents)
        self._ats: list[int] = []
        end = 0
        for extent in self._extents:
            self._ats.append(end)
            end += extent.end - extent.start
        self.nbytes = end

    @property
    def key(self) -> str:
        """The same on processes that read the same."""
        return digest(repr([(e.path, e.start, e.end) for e in self._extents]).encode())

    def parts(self, start: int, end: int) -> Iterator[BatchRead]:
        """Yield what lies from byte `start` to `end` of the batch; `at` counts from `start`."""
        first = max(bisect.bisect_right(self._ats, start) - 1, 0)
        for at, extent in zip(self._ats[first:], self._extents[first:], strict=True):
            low = max(start, at)
            high = min(end, at + extent.end - extent.start)
            if at >= end:
                return
            if low < high:
                yield BatchRead(extent.path, extent.start + low - at, high - low, low - start)

    def place(self, path: str, start: int, nbytes: int) -> int:
        """Return where in the batch bytes of a file lie.

        Raises:
            KeyError: The batch does not have all of them.
        """
        number = bisect.bisect_right(self._extents, (path, start), key=_start_of) - 1
        if number >= 0:
            extent = self._extents[number]
            if extent.path == path and start + nbytes <= extent.end:
                return self._ats[number] + start - extent.start
        raise KeyError((path, start, nbytes))


def _start_of(extent: ByteRange) -> tuple[str, int]:
    return extent.path, extent.start


def _merged(extents: Iterable[ByteRange]) -> list[ByteRange]:
    merged: list[ByteRange] = []
    for each in sorted(extents):
        last = merged[-1] if merged else None
        if last is not None and last.path == each.path and each.start - last.end <= MOST_SKIPPED:
            merged[-1] = ByteRange(last.path, last.start, max(last.end, each.end))
        else:
            merged.append(each)
    return merged


def fill(units: Sequence[Sequence[ByteRange]], capacity: int) -> list[ReadBatch]:
    """Return batches of successive units, of at most `capacity` bytes unless one alone has more.

    Args:
        units: The extents of what is worked on at once.
        capacity: Bytes of a batch.
    """
    batches: list[ReadBatch] = []
    first = taken = 0
    for number, extents in enumerate(units):
        # As much as it may become by what is read over.
        nbytes = sum(each.end - each.start + MOST_SKIPPED for each in extents)
        if number > first and taken + nbytes > capacity:
            batches.append(_batch(units, range(first, number)))
            first, taken = number, 0
        taken += nbytes
    if first < len(units):
        batches.append(_batch(units, range(first, len(units))))
    return batches


def _batch(units: Sequence[Sequence[ByteRange]], numbers: range) -> ReadBatch:
    return ReadBatch(numbers, (extent for number in numbers for extent in units[number]))


def shares_key(batches: Sequence[ReadBatch]) -> str:
    """Return what members of one group have in common, and nobody else."""
    return digest("".join(batch.key for batch in batches).encode())
