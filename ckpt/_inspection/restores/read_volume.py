"""The reads of all processes of a job: counted, as records, with advice."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct

from ckpt._format.array_format import MIN_CHUNK_BYTES, choose_chunk, parse_dtype
from ckpt._format.leaf_table import LeafEntry
from ckpt._format.manifest import Manifest
from ckpt._inspection.restores.placements import (
    HeldPart,
    WantedArray,
    WantedItem,
    alike,
    requests_of,
    stored_shard,
)
from ckpt._plan.chunk_reads import ChunkRead, ReadRequest, is_read_whole, request_bytes

Shape = tuple[int, ...]

# Smaller savings are not worth another array format.
_LEAST_TIMES = 1.1
_LEAST_BYTES = 1 << 20
_NUMBER = re.compile(r"[0-9]+")


class LeafReads(Struct, frozen=True):
    """The reads of an array by all processes together.

    Attributes:
        item: Name of its item; empty if the checkpoint is one object.
        path: Its leaf path.
        shape: Its shape.
        chunks: Shape of its stored chunks.
        region: Shape of the smallest region that a process needs.
        needed: Sum of the bytes of the regions that the processes need.
        read: Sum of the bytes of the chunks that they read, decoded.
        amplification: `read` over `needed`.
    """

    item: str
    path: str
    shape: Shape
    chunks: Shape
    region: Shape
    needed: int
    read: int
    amplification: float


class LayoutAdvice(Struct, frozen=True):
    """An array format with which fewer bytes of some arrays would be read.

    Attributes:
        pattern: A pattern that covers the arrays, with `*` for numbers; the leaf path of a single
            array.
        arrays: Number of the arrays.
        wasted: Bytes of the arrays that all processes together read beyond their need.
        chunk_bytes: For `ArrayFormat`: about the bytes of a region.
        split_axes: For `ArrayFormat`: the axes along which regions end within chunks.
    """

    pattern: str
    arrays: int
    wasted: int
    chunk_bytes: int
    split_axes: tuple[int, ...]


def layout_advice(
    leaves: Iterable[LeafReads], shards: Sequence[Shape], itemsizes: Sequence[int]
) -> list[LayoutAdvice]:
    """Return array formats with which fewer bytes would be read, the worst waste first.

    Args:
        leaves: The reads of each leaf.
        shards: The shape of the shards in which each leaf was saved.
        itemsizes: Bytes of an element of each leaf.
    """
    alike: dict[tuple[str, int, tuple[int, ...]], list[LeafReads]] = {}
    for leaf, shard, itemsize in zip(leaves, shards, itemsizes, strict=True):
        if leaf.amplification < _LEAST_TIMES or leaf.read - leaf.needed < _LEAST_BYTES:
            continue
        found = _format_for(leaf, shard, itemsize)
        if found is not None:
            nbytes, axes = found
            key = (_NUMBER.sub("*", leaf.path), nbytes, axes)
            alike.setdefault(key, []).append(leaf)
    advice = [
        LayoutAdvice(
            pattern if len(each) > 1 else each[0].path,
            len(each),
            sum(leaf.read - leaf.needed for leaf in each),
            nbytes,
            axes,
        )
        for (pattern, nbytes, axes), each in alike.items()
    ]
    return sorted(advice, key=lambda each: (-each.wasted, each.pattern))


def _format_for(leaf: LeafReads, shard: Shape, itemsize: int) -> tuple[int, tuple[int, ...]] | None:
    """Return `chunk_bytes` and `split_axes` that align chunks with the regions, or None."""
    axes = tuple(
        axis
        for axis, (length, chunk) in enumerate(zip(leaf.region, leaf.chunks, strict=True))
        if length % chunk
    )
    nbytes = math.prod(leaf.region) * itemsize
    while axes and nbytes >= MIN_CHUNK_BYTES:
        chunks = choose_chunk(leaf.shape, shard, itemsize, nbytes, axes)
        if not any(length % chunk for length, chunk in zip(leaf.region, chunks, strict=True)):
            return nbytes, axes
        nbytes //= 2
    return None


class FileShare(Struct, frozen=True):
    """The bytes of a data file that a process reads.

    Attributes:
        path: The file, relative to the step.
        read: Bytes that are read from it.
        share: `read` over the size of the file; None if the size is unknown.
    """

    path: str
    read: int
    share: float | None


class ProcessReads(Struct, frozen=True):
    """The reads of one process.

    Attributes:
        process: Its number.
        devices: Number of its devices.
        held: Bytes of arrays on its devices and in its memory, including replicas.
        read: Bytes that it reads from data files.
        requests: Number of its requests.
        files: Number of files that it reads.
        most_of: The file of which it reads the largest share; None if it reads nothing.
    """

    process: int
    devices: int
    held: int
    read: int
    requests: int
    files: int
    most_of: FileShare | None


class OtherItem(Struct, frozen=True):
    """An item without arrays. Its handler reads files of its own, which are not counted.

    Attributes:
        name: Name of the item.
        handler: Its handler.
        nbytes: Bytes of its files, as its handler reported them.
    """

    name: str
    handler: str
    nbytes: int


class RestoreExplanation(Struct, frozen=True):
    """The reads of a restore.

    Attributes:
        path: Path of the checkpoint.
        step: Its number, or None.
        mesh: Sizes of the axes of the mesh to restore onto; None for a restore as saved.
        platform: Platform on which most was saved.
        arrays: Number of arrays to restore.
        nbytes: Bytes of the arrays, each counted once.
        stored: Bytes of data files that any process reads, each counted once.
        read: Sum of the bytes that the processes read.
        requests: Sum of the requests of the processes.
        shared: Bytes read if processes that hold the same parts shared their reads.
        budget: Budget of host memory of each process.
        concurrent: Number of requests in progress at one time in each process.
        processes: The reads of each process.
        leaves: The arrays that are read beyond the need, the worst first.
        advice: Array formats that would save reads.
        others: Items without arrays.
        notes: Assumptions of the plan.
    """

    path: str
    step: int | None
    mesh: Mapping[str, int] | None
    platform: str
    arrays: int
    nbytes: int
    stored: int
    read: int
    requests: int
    shared: int
    budget: int
    concurrent: int
    processes: list[ProcessReads]
    leaves: list[LeafReads]
    advice: list[LayoutAdvice]
    others: list[OtherItem]
    notes: list[str]


# Name of an item, and number of one of its leaves.
_Leaf = tuple[str, int]


class _GroupReads(Struct, frozen=True):
    """The reads of each process of a group that needs the same parts.

    Attributes:
        held: Bytes of arrays.
        requests: Number of requests.
        files: Bytes that are read of each file.
    """

    held: int
    requests: int
    files: Counter[str]


class ReadVolume:
    """The reads of some items by the processes of a job.

    Attributes:
        nbytes: Bytes of the arrays, each counted once.
        stored: Bytes of files that any process reads, each counted once.
        shared: Bytes read if processes that hold the same parts shared their reads.
    """

    def __init__(
        self,
        items: Sequence[WantedItem],
        processes: int,
        budget: int,
        *,
        in_memory: Collection[str],
    ) -> None:
        """Plan the reads of every process.

        Args:
            items: The items to restore.
            processes: Number of processes.
            budget: Budget of host memory of each process.
            in_memory: Data files that are in memory already and need no read.

        Raises:
            TargetMismatchError: A chunk is on the disk of another process.
        """
        self._items = items
        self._in_memory = in_memory
        self._budget = budget
        self._by_process: dict[int, _GroupReads] = {}
        self._read_of: Counter[_Leaf] = Counter()
        self._needed_of: Counter[_Leaf] = Counter()
        # Bytes of an array that each group of processes with the same part could read once for all.
        self._once: dict[_Leaf, dict[HeldPart, int]] = {}
        ranges: set[tuple[str, int, int]] = set()
        for members in alike(items, processes):
            found = self._plan(members, ranges)
            self._by_process.update(dict.fromkeys(members, found))
        self.nbytes = sum(_nbytes(array.leaf) for item in items for array in item.arrays)
        self.stored = _length(ranges)
        read = sum(each.files.total() for each in self._by_process.values())
        self.shared = read - sum(
            self._saved(item, array) for item in items for array in item.arrays
        )

    def processes(self, devices: Sequence[int], manifest: Manifest) -> list[ProcessReads]:
        sizes = {path: file.size for path, file in manifest.files.items()}
        sizes |= {path: source.size for path, source in manifest.sources.items()}
        found = []
        for process, count in enumerate(devices):
            reads = self._by_process[process]
            shares = [
                FileShare(path, read, read / sizes[path] if sizes.get(path) else None)
                for path, read in reads.files.items()
            ]
            most = max(shares, key=lambda each: (each.share or 0, each.read), default=None)
            found.append(
                ProcessReads(
                    process,
                    count,
                    reads.held,
                    reads.files.total(),
                    reads.requests,
                    len(reads.files),
                    most,
                )
            )
        return found

    def leaves(self, unnamed: bool) -> list[LeafReads]:
        """Return the arrays that are read beyond the need, the worst first.

        Packed arrays are left out: they are small, and read whole.
        """
        found = [self._leaf_reads(item, array, unnamed) for item, array in self._costly()]
        return sorted(found, key=lambda each: (each.needed - each.read, each.item, each.path))

    def advice(self, manifest: Manifest) -> list[LayoutAdvice]:
        """Return array formats with which fewer bytes would be read."""
        costly = self._costly()
        shards = []
        for item, array in costly:
            number, places = array.leaf.sharding, manifest.items[item.name].shardings
            entry = None if number is None else places[number]
            shards.append(stored_shard(entry, tuple(array.leaf.shape)))
        return layout_advice(
            [self._leaf_reads(item, array, True) for item, array in costly],
            shards,
            [parse_dtype(array.leaf.dtype).itemsize for _, array in costly],
        )

    def _plan(self, members: Sequence[int], ranges: set[tuple[str, int, int]]) -> _GroupReads:
        """Plan and sum the reads of processes that need the same parts."""
        process, limit = members[0], request_bytes(self._budget)
        files: Counter[str] = Counter()
        held = count = 0
        for item in self._items:
            requests = requests_of(item, process, limit)
            self._count(item, members, requests)
            for request in requests:
                source = request.source
                if source.path not in self._in_memory:
                    files[source.path] += source.nbytes
                    ranges.add((source.path, source.start, source.end))
                    count += 1
            held += sum(
                each.held.parts[process].elements * parse_dtype(each.leaf.dtype).itemsize
                for each in item.arrays
            )
        return _GroupReads(held, count, files)

    def _count(
        self, item: WantedItem, members: Sequence[int], requests: Iterable[ReadRequest]
    ) -> None:
        """Add the needed and the read bytes of each array."""
        process = members[0]
        numbers = {item.leaves[array.number].name: array.number for array in item.arrays}
        stored: Counter[int] = Counter()
        for request in requests:
            for chunk in request.chunks:
                number = numbers[chunk.leaf.name]
                self._read_of[item.name, number] += len(members) * chunk.nbytes
                if request.source.path not in self._in_memory:
                    stored[number] += _stored_bytes(chunk)
        for array in item.arrays:
            part = array.held.parts[process]
            elements = sum(region.size for region in part.regions)
            itemsize = parse_dtype(array.leaf.dtype).itemsize
            leaf = item.name, array.number
            self._needed_of[leaf] += len(members) * elements * itemsize
            self._once.setdefault(leaf, {}).setdefault(part, stored[array.number])

    def _saved(self, item: WantedItem, array: WantedArray) -> int:
        """Return the bytes of an array that are not read if processes share their reads."""
        groups = Counter(array.held.parts)
        if len(set(groups.values())) != 1:
            # Some parts are held by more processes than others. Then no reads are shared.
            return 0
        once = self._once[item.name, array.number]
        return sum((members - 1) * once[part] for part, members in groups.items())

    def _costly(self) -> list[tuple[WantedItem, WantedArray]]:
        return [
            (item, array)
            for item in self._items
            for array in item.arrays
            if not is_read_whole(array.leaf)
            and self._read_of[item.name, array.number] > self._needed_of[item.name, array.number]
        ]

    def _leaf_reads(self, item: WantedItem, array: WantedArray, unnamed: bool) -> LeafReads:
        leaf = array.leaf
        regions = [region for part in array.held.parts for region in part.regions]
        needed = self._needed_of[item.name, array.number]
        read = self._read_of[item.name, array.number]
        return LeafReads(
            "" if unnamed else item.name,
            array.path,
            tuple(leaf.shape),
            tuple(leaf.chunks),
            min(regions, key=lambda region: region.size).shape,
            needed,
            read,
            read / needed,
        )


def _nbytes(leaf: LeafEntry) -> int:
    return math.prod(leaf.shape) * parse_dtype(leaf.dtype).itemsize


def _stored_bytes(chunk: ChunkRead) -> int:
    return chunk.end - chunk.start


def _length(ranges: Iterable[tuple[str, int, int]]) -> int:
    """Return the number of bytes of files in the union of some ranges."""
    total, path, last = 0, "", 0
    for where, start, end in sorted(ranges):
        if where != path:
            path, last = where, 0
        total += max(end - max(start, last), 0)
        last = max(last, end)
    return total
