"""Ownership of chunks: each has one owner, one of the processes that hold it. Pure.

Every process computes its own part from data that is the same on all processes, and looks only at
shards that it holds. The processes that hold the same shards are a replica group. Each member knows
the chunks that the group has to write, divides them in the same order, largest first and always to
the member with the least so far, and takes its own part. Chunks that one process alone holds need
no dividing. In a shared place only the owner writes a chunk; if each process has a place of its
own, the other holders write it as well, as a copy.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
from msgspec import Struct, field

from ckpt._arguments import invalid
from ckpt._format.digests import digest
from ckpt.errors import InvalidArgumentError, UnsupportedLeafError

Shape = tuple[int, ...]


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
        parts = _grid_of(sharding, shape)
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
        places = _places_by_device(sharding, parts)
        index = self.group.index
        own: dict[Shape, int] = {}
        for shard, place in enumerate(place for process, place in places if process == index):
            own.setdefault(place, shard)
        held = _held(places)
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


def regions_by_process(
    sharding: jax.sharding.Sharding, shape: Shape
) -> dict[int, frozenset[Shape]]:
    """Return for every process the places in the shard grid that its devices hold."""
    return {
        process: frozenset(found)
        for process, found in _held(_places_by_device(sharding, _grid_of(sharding, shape))).items()
    }


def holders_of(sharding: jax.sharding.Sharding, shape: Shape, offset: Shape) -> tuple[int, ...]:
    """Return the processes that hold the element of an array at `offset`, for messages."""
    parts = _grid_of(sharding, shape)
    wanted = tuple(o * p // n for o, p, n in zip(offset, parts, shape, strict=True))
    places = _places_by_device(sharding, parts)
    return tuple(sorted({process for process, place in places if place == wanted}))


def _held(places: Iterable[tuple[int, Shape]]) -> dict[int, set[Shape]]:
    held: dict[int, set[Shape]] = {}
    for process, place in places:
        held.setdefault(process, set()).add(place)
    return held


def _grid_of(sharding: jax.sharding.Sharding, shape: Shape) -> Shape:
    shard = sharding.shard_shape(shape)
    return tuple(n // s if s else 1 for n, s in zip(shape, shard, strict=True))


def _places_by_device(sharding: jax.sharding.Sharding, parts: Shape) -> list[tuple[int, Shape]]:
    """Return for every device its process, and the place in the shard grid that it holds."""
    devices: Mapping[jax.Device, tuple[slice, ...]] = sharding.devices_indices_map(parts)
    return [
        (device.process_index, tuple(part.start or 0 for part in index))
        for device, index in devices.items()
    ]
