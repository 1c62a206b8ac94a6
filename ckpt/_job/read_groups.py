"""Read groups: processes that need the same bytes divide the reads among them. Pure.

Processes whose devices hold the same shards of an array need the same chunks of it. They form a
group. Each member computes the same stream of bytes from data that all of them have. The stream is
cut into batches, and a batch into as many shares as the group has members. Each member reads its
share; then all of them exchange.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import jax
import msgspec

from ckpt._format.digests import digest
from ckpt._plan.chunk_reads import ByteRange
from ckpt._plan.chunking import regions_by_process
from ckpt._plan.targets import ArrayRead

Shape = tuple[int, ...]

# Largest gap between two ranges that is read with them: the padding between chunks.
MOST_SKIPPED = 4096


@dataclass(frozen=True, slots=True)
class Grouping:
    """The processes of a job, grouped by the part of an array that they hold.

    Attributes:
        groups: The process numbers of each group, ascending. All groups have the same number of
            members, two or more, and every process is in one.
        devices: For every process, by number, its devices that hold a part.
        is_own: True if each process has an array of its own, which is the same on all of them.
    """

    groups: tuple[tuple[int, ...], ...]
    devices: tuple[tuple[jax.Device, ...], ...] = field(compare=False)
    is_own: bool = False

    @property
    def members(self) -> int:
        """Number of processes in each group."""
        return len(self.groups[0])

    @property
    def lanes(self) -> int:
        """Least number of devices of any process."""
        return min(map(len, self.devices))

    @property
    def key(self) -> str:
        """A text that is the same on processes with the same groups and devices."""
        ids = [[device.id for device in each] for each in self.devices]
        return digest(repr((self.groups, ids, self.is_own)).encode())

    def group_of(self, process: int) -> tuple[int, ...]:
        """Return the processes that hold the same part as `process`, itself included."""
        return next(group for group in self.groups if process in group)


def grouping_of_all(devices: Iterable[jax.Device], processes: int) -> Grouping | None:
    """Return the grouping of data that each process has for itself; None if it cannot be exchanged.

    Args:
        devices: The devices of the job.
        processes: Number of processes. There is no exchange if one of them has no device.
    """
    found = list(devices)
    everyone = tuple(range(processes))
    if {device.process_index for device in found} != {*everyone}:
        return None
    return Grouping((everyone,), _by_process(found, processes), is_own=True)


class Groupings(msgspec.Struct):
    """Finds the groupings of arrays; analyses every sharding once.

    Attributes:
        processes: Number of processes.
        own: The grouping of arrays that every process has for itself; None if they are not shared.
    """

    processes: int
    own: Grouping | None = None
    _by_identity: dict[int, tuple[object, Grouping | None]] = msgspec.field(default_factory=dict)
    _known: dict[jax.sharding.Sharding, Grouping | None] = msgspec.field(default_factory=dict)

    def of(self, read: ArrayRead) -> Grouping | None:
        """Return the grouping of an array, or None if there is nothing to share.

        An array is not shared if its parts differ between all processes, or if some processes of
        the job hold more of it than others.
        """
        sharding = read.target.sharding
        if 0 in read.shape:
            return None
        if sharding is None or sharding.is_fully_addressable:
            return self.own
        known = self._by_identity.get(id(sharding))
        if known is None:
            # jax cuts arrays evenly, so all arrays of a sharding are held in the same way.
            if sharding not in self._known:
                self._known[sharding] = _group_processes(sharding, read.shape, self.processes)
            known = self._by_identity[id(sharding)] = sharding, self._known[sharding]
        return known[1]


def _group_processes(
    sharding: jax.sharding.Sharding, shape: Shape, processes: int
) -> Grouping | None:
    held = regions_by_process(sharding, shape)
    if sorted(held) != list(range(processes)):
        return None
    alike: dict[frozenset[Shape], list[int]] = {}
    for process in range(processes):
        alike.setdefault(held[process], []).append(process)
    groups = tuple(map(tuple, alike.values()))
    sizes = set(map(len, groups))
    if len(sizes) > 1 or sizes == {1}:
        return None
    return Grouping(groups, _by_process(sharding.device_set, processes))


def _by_process(
    devices: Iterable[jax.Device], processes: int
) -> tuple[tuple[jax.Device, ...], ...]:
    held: list[list[jax.Device]] = [[] for _ in range(processes)]
    for device in sorted(devices, key=lambda device: device.id):
        held[device.process_index].append(device)
    return tuple(map(tuple, held))


def groupings_of(
    reads: Iterable[ArrayRead], processes: int, own: Grouping | None = None
) -> dict[int, Grouping]:
    """Return the grouping of every stored leaf that is shared, by number of the leaf.

    A leaf that arrays of several groupings need is not shared: a process cannot tell from its own
    part of these arrays what the others need of the leaf.

    Args:
        reads: The arrays.
        processes: Number of processes.
        own: The grouping of arrays that every process has for itself; None if they are not shared.
    """
    groupings = Groupings(processes, own)
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


class BatchRead(msgspec.Struct, frozen=True):
    """A part of a batch for one read: `nbytes` from `start` of a file go to `at`."""

    path: str
    start: int
    nbytes: int
    at: int


class ReadBatch:
    """Bytes that a group reads together, in their order in the exchanged memory.

    Attributes:
        requests: Numbers of the requests whose bytes they are.
        nbytes: Number of bytes.
    """

    def __init__(self, requests: range, ranges: Iterable[ByteRange]) -> None:
        """Take the ranges of `requests`; ranges that overlap, or nearly touch, become one."""
        self.requests = requests
        self._ranges = _merged(ranges)
        self._ats: list[int] = []
        end = 0
        for each in self._ranges:
            self._ats.append(end)
            end += each.nbytes
        self.nbytes = end

    @property
    def key(self) -> str:
        """A text that is the same on processes that read the same bytes."""
        return digest(repr([(e.path, e.start, e.end) for e in self._ranges]).encode())

    def parts(self, start: int, end: int) -> Iterator[BatchRead]:
        """Yield the reads of bytes `start` to `end` of the batch; `at` counts from `start`."""
        first = max(bisect.bisect_right(self._ats, start) - 1, 0)
        for at, each in zip(self._ats[first:], self._ranges[first:], strict=True):
            low = max(start, at)
            high = min(end, at + each.nbytes)
            if at >= end:
                return
            if low < high:
                yield BatchRead(each.path, each.start + low - at, high - low, low - start)

    def place(self, path: str, start: int, nbytes: int) -> int:
        """Return the place in the batch of some bytes of a file.

        Raises:
            KeyError: The batch does not have all of them.
        """
        number = bisect.bisect_right(self._ranges, (path, start), key=_start_of) - 1
        if number >= 0:
            found = self._ranges[number]
            if found.path == path and start + nbytes <= found.end:
                return self._ats[number] + start - found.start
        raise KeyError((path, start, nbytes))


def _start_of(each: ByteRange) -> tuple[str, int]:
    return each.path, each.start


def _merged(ranges: Iterable[ByteRange]) -> list[ByteRange]:
    merged: list[ByteRange] = []
    for each in sorted(ranges):
        last = merged[-1] if merged else None
        if last is not None and last.path == each.path and each.start - last.end <= MOST_SKIPPED:
            merged[-1] = ByteRange(last.path, last.start, max(last.end, each.end))
        else:
            merged.append(each)
    return merged


def fill(ranges: Sequence[ByteRange], capacity: int) -> list[ReadBatch]:
    """Return batches of successive requests.

    Args:
        ranges: The range of every request.
        capacity: Most bytes of a batch, unless a single request has more.
    """
    batches: list[ReadBatch] = []
    first = taken = 0
    for number, each in enumerate(ranges):
        # Includes the gap before it, which may be read, too.
        nbytes = each.nbytes + MOST_SKIPPED
        if number > first and taken + nbytes > capacity:
            batches.append(ReadBatch(range(first, number), ranges[first:number]))
            first, taken = number, 0
        taken += nbytes
    if first < len(ranges):
        batches.append(ReadBatch(range(first, len(ranges)), ranges[first:]))
    return batches


def shares_key(batches: Sequence[ReadBatch]) -> str:
    """Return a text that is the same on the members of one group, and on no other process."""
    return digest("".join(batch.key for batch in batches).encode())
