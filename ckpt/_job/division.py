"""The division of a tree among processes: each chunk has one owner, one that holds it. Pure.

Every process computes its own part from data that is the same on all processes, and looks only at
shards that it holds. The processes that hold the same shards are a replica group. Each member knows
the chunks that the group has to write, divides them in the same order, largest first and always to
the member with the least so far, and takes its own part. Chunks that one process alone holds need
no dividing. In a shared place only the owner writes a chunk; if each process has a place of its
own, the other holders write it as well, as a copy.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
from msgspec import Struct, field

from ckpt._arguments import invalid
from ckpt._format.array_format import DTYPES
from ckpt._format.manifest import Node
from ckpt._format.manifest_head import digest
from ckpt._format.regions import Region, Shape, chunk_grid, chunk_region, position_in_grid, whole
from ckpt._job.process_reports import TreeFingerprint, tree_fingerprint
from ckpt._plan.chunking import (
    LeafPlan,
    LeafPlanner,
    held_places,
    places_by_device,
    shard_grid,
    stored_bytes,
    whole_leaf_chunks,
)
from ckpt._plan.save_plan import SavePlan
from ckpt._plan.write_batches import Chunk, ChunkPart
from ckpt._tree.leaf_specs import LeafSpec
from ckpt.errors import InvalidArgumentError, UnsupportedLeafError


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """The processes of a job, as one of them sees them.

    Attributes:
        index: Number of this process. Process 0 is the primary: it writes all data that is not
            spread over processes.
        count: Number of processes.
        mode: `shared`: all processes write into one place, everything once. `local`: every process
            writes all that it holds into a place of its own.

    Raises:
        InvalidArgumentError: The numbers or the mode are invalid.
    """

    index: int
    count: int
    mode: Literal["shared", "local"] = "shared"

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.index < self.count:
            raise InvalidArgumentError(
                f"ProcessGroup(index={self.index!r}, count={self.count!r}): expected a count of at "
                "least 1, and an index from 0 to count - 1"
            )
        if self.mode not in ("shared", "local"):
            raise invalid("mode", self.mode, "'shared' or 'local'", of="ProcessGroup")


class ReplicaGroup(Struct, frozen=True, eq=False):
    """Processes that hold the same shards.

    Attributes:
        members: Their numbers, ascending.
        rank: Position of this process among them.
        start: Position of the member that comes first while all have the same amount; it differs
            from group to group, so that the lowest numbers do not get the remainder of everything.
    """

    members: tuple[int, ...]
    rank: int
    start: int


class LocalShard(Struct, frozen=True):
    """A shard that this process holds.

    Attributes:
        place: Its place in the shard grid of its array.
        shard: Position in `addressable_shards` of its first replica in this process.
    """

    place: Shape
    shard: int


class ArrayPlacement(Struct, frozen=True, eq=False):
    """The placement of an array on the devices of several processes, as one of them sees it.

    Attributes:
        shards: The shards that this process holds, by the group that holds them.
        is_whole_somewhere: True if some process holds the whole array.
        whole_group: The group of processes that hold the whole array, or None if this process is
            not one.
    """

    shards: tuple[tuple[ReplicaGroup, tuple[LocalShard, ...]], ...]
    is_whole_somewhere: bool
    whole_group: ReplicaGroup | None


_EMPTY = ArrayPlacement((), is_whole_somewhere=True, whole_group=None)


class Ownership(Struct):
    """Finds the processes that hold each array of one tree; analyses every placement once."""

    group: ProcessGroup
    _ranges: dict[int, tuple[object, tuple[int, int]]] = field(default_factory=dict)
    _placements: dict[tuple[int, Shape], tuple[object, ArrayPlacement]] = field(
        default_factory=dict
    )
    _known: dict[tuple[jax.sharding.Sharding, Shape], ArrayPlacement] = field(default_factory=dict)
    _groups: dict[tuple[int, ...], ReplicaGroup] = field(default_factory=dict)

    def placement(
        self, sharding: jax.sharding.Sharding | None, shape: Shape, name: str
    ) -> ArrayPlacement | None:
        """Return the placement of an array on several processes; None if it is on this one alone.

        Args:
            sharding: Its sharding; None for all but jax arrays.
            shape: Its shape.
            name: Name of the leaf, for messages.

        Raises:
            UnsupportedLeafError: The array is on devices of one other process only.
            InvalidArgumentError: The array is on a process that does not save.
        """
        if sharding is None:
            return None
        first, last = self._range_of(sharding)
        if first == last == self.group.index:
            return None
        if last >= self.group.count:
            raise InvalidArgumentError(
                f"an array is on devices of process {last}, and only {self.group.count} "
                "processes save",
                leaf=name,
            )
        if first == last and self.group.mode == "shared":
            raise UnsupportedLeafError(
                f"the array is on devices of process {first} only, which cannot tell it "
                "from an array of its own. Spread it over devices of several processes, or leave "
                "it out",
                leaf=name,
            )
        if 0 in shape:
            return _EMPTY
        # Shards are even, so only the number of parts of every axis matters.
        parts = shard_grid(sharding, shape)
        by_identity = self._placements.get((id(sharding), parts))
        if by_identity is not None:
            return by_identity[1]
        # Hashing a sharding is slow, so identity comes first; jax also makes new, equal ones.
        found = self._known.get((sharding, parts))
        if found is None:
            found = self._known[sharding, parts] = self._find(sharding, parts)
        self._placements[id(sharding), parts] = sharding, found
        return found

    def _range_of(self, sharding: jax.sharding.Sharding) -> tuple[int, int]:
        """Return the first and the last process that have devices of a sharding."""
        known = self._ranges.get(id(sharding))
        if known is None:
            devices: set[jax.Device] = sharding.device_set
            found = {device.process_index for device in devices}
            known = self._ranges[id(sharding)] = (sharding, (min(found), max(found)))
        return known[1]

    def _find(self, sharding: jax.sharding.Sharding, parts: Shape) -> ArrayPlacement:
        places = places_by_device(sharding, parts)
        index = self.group.index
        own: dict[Shape, int] = {}
        for shard, place in enumerate(place for process, place in places if process == index):
            own.setdefault(place, shard)
        held = held_places(places)
        holders = {
            place: {process for process, found in held.items() if place in found} for place in own
        }
        shards: dict[ReplicaGroup, list[LocalShard]] = {}
        # Sorted, so that all processes have the same order.
        for place in sorted(own):
            group = self._replica_group(holders[place])
            shards.setdefault(group, []).append(LocalShard(place, own[place]))
        count = len({place for _, place in places})
        whole = {process for process, found in held.items() if len(found) == count}
        if self.group.mode == "local" and len(whole) < len(held):
            # No process writes for another one.
            whole = set()
        return ArrayPlacement(
            tuple((group, tuple(held)) for group, held in shards.items()),
            bool(whole),
            self._replica_group(whole) if index in whole else None,
        )

    def _replica_group(self, processes: set[int]) -> ReplicaGroup:
        """Return the group of `processes`, one of which is this one."""
        members = tuple(sorted(processes))
        known = self._groups.get(members)
        if known is None:
            start = int(digest(repr(members).encode())[:8], 16) % len(members)
            rank = members.index(self.group.index)
            known = self._groups[members] = ReplicaGroup(members, rank, start)
        return known


class _LeafChunks(Struct, frozen=True):
    leaf: int
    chunks: int
    nbytes: int


class Partitioner(Struct):
    """The chunks of replica groups, divided among their members."""

    _work: dict[ReplicaGroup, list[_LeafChunks]] = field(default_factory=dict)

    def add(self, group: ReplicaGroup, leaf: int, chunks: int, nbytes: int) -> None:
        """Add `chunks` chunks of a leaf, of `nbytes` each, to the work of a group."""
        self._work.setdefault(group, []).append(_LeafChunks(leaf, chunks, nbytes))

    def own(self) -> Mapping[tuple[int, ReplicaGroup], range]:
        """Return the numbers of the chunks that this process owns, by leaf and group."""
        return {
            (leaf, group): chunks
            for group, work in self._work.items()
            for leaf, chunks in _own_part(group, work)
        }

    def copies(self) -> Mapping[tuple[int, ReplicaGroup], Sequence[int]]:
        """Return the chunks that this process holds and another one owns, in the same form."""
        own = self.own()
        return {
            (each.leaf, group): [
                n for n in range(each.chunks) if n not in own.get((each.leaf, group), ())
            ]
            for group, work in self._work.items()
            for each in work
        }


def _own_part(group: ReplicaGroup, work: list[_LeafChunks]) -> list[tuple[int, range]]:
    count = len(group.members)
    if count == 1:
        return [(each.leaf, range(each.chunks)) for each in work]
    # Load of every member beyond the common one, and its turn among equal loads.
    loads = [(0, (rank - group.start) % count, rank) for rank in range(count)]
    heapq.heapify(loads)
    found = []
    for each in sorted(work, key=lambda each: (-each.nbytes, each.leaf)):
        equal, rest = divmod(each.chunks, count)
        taken = [heapq.heappop(loads) for _ in range(rest)]
        for load, turn, rank in taken:
            heapq.heappush(loads, (load + each.nbytes, turn, rank))
        more = sum(rank == group.rank for _, _, rank in taken)
        start = equal * group.rank + sum(rank < group.rank for _, _, rank in taken)
        if equal or more:
            found.append((each.leaf, range(start, start + equal + more)))
    return found


class Division:
    """What one process of a group plans to save of one tree; the methods are those of `Undivided`.

    Attributes:
        group: The processes, and the number of this one.
        count: Number of processes.
        spans: True: arrays may be spread over the devices of several processes.
        own: Numbers of the leaves that every process has for itself, once they are planned.
    """

    spans = True

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.count: int = group.count
        self.own: list[int] = []
        self._placements: dict[int, ArrayPlacement] = {}
        self._partitioner = Partitioner()

    def leaves(
        self, names: Sequence[str], specs: Sequence[LeafSpec], planner: LeafPlanner
    ) -> list[LeafPlan]:
        """Return the plans of all leaves; note which processes hold each."""
        ownership, leaves = Ownership(self.group), []
        for number, (name, spec) in enumerate(zip(names, specs, strict=True)):
            placement = ownership.placement(spec.sharding, spec.shape, name)
            leaf = planner.plan(name, spec, placement)
            leaves.append(leaf)
            if placement is not None:
                self._placements[number] = placement
                if leaf.has_chunks:
                    _add_leaf(self._partitioner, number, leaf, placement)
            elif spec.same_as is None:
                self.own.append(number)
        return leaves

    def chunks(self, leaves: Sequence[LeafPlan]) -> tuple[list[Chunk], list[Chunk]]:
        """Return the chunks that this process owns, and copies of others that it writes, too."""
        is_local, parts = self.group.mode == "local", self._partitioner.own()
        others = self._partitioner.copies() if is_local else {}
        found: list[Chunk] = []
        copies: list[Chunk] = []
        for number, leaf in enumerate(leaves):
            placement = self._placements.get(number)
            if not leaf.has_chunks:
                continue
            if placement is not None:
                found.extend(_shared_chunks(number, leaf, placement, parts))
                copies.extend(_shared_chunks(number, leaf, placement, others))
            elif self.group.index == 0:
                found.extend(whole_leaf_chunks(number, leaf, 0))
            elif is_local:
                copies.extend(whole_leaf_chunks(number, leaf, self.group.index))
        return found, copies

    def fingerprint(self, plan: SavePlan, nodes: Sequence[Node]) -> TreeFingerprint:
        """Return the fingerprint of the tree, which the processes compare."""
        return tree_fingerprint(plan, nodes)


def _add_leaf(
    partitioner: Partitioner, number: int, leaf: LeafPlan, placement: ArrayPlacement
) -> None:
    """Add the chunks of a leaf to the work of this process's groups."""
    stored = stored_bytes(leaf)
    if leaf.packed:
        if placement.whole_group is not None:
            partitioner.add(placement.whole_group, number, 1, stored)
        return
    in_shard = math.prod(_chunks_of_shard(leaf))
    for group, shards in placement.shards:
        partitioner.add(group, number, in_shard * len(shards), stored)


def _shared_chunks(
    number: int,
    leaf: LeafPlan,
    placement: ArrayPlacement,
    wanted: Mapping[tuple[int, ReplicaGroup], Sequence[int]],
) -> Iterable[Chunk]:
    """Yield this process's chunks of a leaf that it holds together with other processes.

    Args:
        number: Number of the leaf.
        leaf: Its plan.
        placement: Its placement on the processes.
        wanted: The chunks to yield, by leaf and group; see `Partitioner`.
    """
    if leaf.packed:
        if placement.whole_group is not None and wanted.get((number, placement.whole_group)):
            yield from whole_leaf_chunks(number, leaf)
        return
    assert leaf.spec.sharding is not None
    shape = leaf.spec.shape
    shard_shape = leaf.spec.sharding.shard_shape(shape)
    stored, itemsize = stored_bytes(leaf), DTYPES[leaf.spec.dtype or ""].itemsize
    grid = _chunks_of_shard(leaf)
    in_shard = math.prod(grid)
    for group, shards in placement.shards:
        for turn in wanted.get((number, group), ()):
            shard = shards[turn // in_shard]
            place = _place(shard.place, grid, turn % in_shard)
            covered = chunk_region(place, leaf.chunk, shape)
            corner = tuple(at * n for at, n in zip(shard.place, shard_shape, strict=True))
            # No other shard has a part of this chunk.
            source = covered.within(Region(corner, shard_shape))
            part = ChunkPart(shard.shard, source, whole(covered.shape))
            position = position_in_grid(place, leaf.grid)
            nbytes = covered.size * itemsize
            yield Chunk(number, position, (part,), place, covered, 0, nbytes, stored)


def _place(shard: Shape, grid: Shape, number: int) -> Shape:
    """Return the place in the chunk grid of chunk `number` of a shard whose own grid is `grid`."""
    place = []
    for first, count in zip(reversed(shard), reversed(grid), strict=True):
        number, index = divmod(number, count)
        place.append(first * count + index)
    return tuple(reversed(place))


def _chunks_of_shard(leaf: LeafPlan) -> Shape:
    assert leaf.spec.sharding is not None
    return chunk_grid(leaf.spec.sharding.shard_shape(leaf.spec.shape), leaf.chunk)
