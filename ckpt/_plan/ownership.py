"""Which process of a job writes what: every chunk once, by one of the processes that hold it. Pure.

Every process works out its own share, from what is the same on all of them. It looks only at shards
that it holds. The processes that hold the same shards are a crew: all of them know what the crew
has to write, deal it out in the same order, largest first, always to the one with the least so far,
and each takes its own part of that. What one process alone holds needs no dealing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import jax

from ckpt._format.digests import digest
from ckpt.errors import InvalidArgumentError, UnsupportedLeafError

__all__ = [
    "ArrayPlacement",
    "HeldShard",
    "Ownership",
    "Partitioner",
    "ProcessGroup",
    "ReplicaGroup",
    "held_by",
    "holders_of",
]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """The processes of a job, as one of them sees them.

    Attributes:
        index: Number of this process. Process 0 is the primary: it writes what is not spread over
            processes.
        count: How many there are.
        mode: `shared`: all write into one place, everything once. `local`: every process writes
            all that it holds into a place of its own.

    Raises:
        InvalidArgumentError: They cannot be meant so.
    """

    index: int
    count: int
    mode: Literal["shared", "local"] = "shared"

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.count < 1 or not 0 <= self.index < self.count:
            raise InvalidArgumentError(
                f"ProcessGroup(index={self.index!r}, count={self.count!r}): expected a count of at "
                "least 1, and an index from 0 to count - 1"
            )
        if self.mode not in ("shared", "local"):
            raise InvalidArgumentError(
                f"ProcessGroup(mode={self.mode!r}): expected 'shared' or 'local'"
            )


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaGroup:
    """Processes that hold the same.

    Attributes:
        members: Their numbers, ascending.
        rank: Place of this process among them.
        start: The place that comes first where nobody has anything yet; not the same one for all
            crews, so that those with the lowest numbers do not get the odd bit of everything.
    """

    members: tuple[int, ...]
    rank: int
    start: int


@dataclass(frozen=True, slots=True)
class HeldShard:
    """A shard that this process holds.

    Attributes:
        place: Its place in the grid of the shards of its array.
        shard: Position in `addressable_shards` of the first replica of it here.
    """

    place: Shape
    shard: int


@dataclass(frozen=True, slots=True, eq=False)
class ArrayPlacement:
    """How an array lies on the devices of several processes, as one of them sees it.

    Attributes:
        shares: The shards that this process holds, by the crew that holds them.
        is_whole: Whether some process holds the whole array.
        whole: The crew of those that do, or None if this process is not among them.
    """

    shares: tuple[tuple[ReplicaGroup, tuple[HeldShard, ...]], ...]
    is_whole: bool
    whole: ReplicaGroup | None


_NOTHING = ArrayPlacement((), is_whole=True, whole=None)


@dataclass(slots=True)
class Ownership:
    """Finds out who holds what of the arrays of one tree; looks at every kind of spread once."""

    team: ProcessGroup
    _ranges: dict[int, tuple[object, tuple[int, int]]] = field(default_factory=dict)
    _spreads: dict[tuple[int, Shape], tuple[object, ArrayPlacement]] = field(default_factory=dict)
    _known: dict[tuple[jax.sharding.Sharding, Shape], ArrayPlacement] = field(default_factory=dict)
    _crews: dict[tuple[int, ...], ReplicaGroup] = field(default_factory=dict)

    def spread(
        self, sharding: jax.sharding.Sharding | None, shape: Shape, name: str
    ) -> ArrayPlacement | None:
        """Return how an array lies on several processes, or None where it is this process's own.

        Args:
            sharding: Its sharding, or None for what is no jax array.
            shape: Its shape.
            name: Name of the leaf, for messages.

        Raises:
            UnsupportedLeafError: It lies on devices of one other process only.
            InvalidArgumentError: It lies on a process that the team does not have.
        """
        if sharding is None:
            return None
        first, last = self._range_of(sharding)
        if first == last == self.team.index:
            return None
        if last >= self.team.count:
            raise InvalidArgumentError(
                f"an array lies on devices of process {last}, and only {self.team.count} processes "
                "save",
                leaf=name,
            )
        if first == last and self.team.mode == "shared":
            raise UnsupportedLeafError(
                f"the array lies on devices of process {first} only, which cannot tell it "
                "from an array of its own. Spread it over devices of several processes, or leave "
                "it out",
                leaf=name,
            )
        if 0 in shape:
            return _NOTHING
        # Shards are even, so that it only matters into how many parts every axis is cut.
        parts = _parts(sharding, shape)
        by_identity = self._spreads.get((id(sharding), parts))
        if by_identity is not None:
            return by_identity[1]
        # Hashing a sharding is slow, and jax makes new ones that are equal.
        found = self._known.get((sharding, parts))
        if found is None:
            found = self._known[sharding, parts] = self._look(sharding, parts)
        self._spreads[id(sharding), parts] = sharding, found
        return found

    def _range_of(self, sharding: jax.sharding.Sharding) -> tuple[int, int]:
        """Return the first and the last process that has devices of a sharding."""
        known = self._ranges.get(id(sharding))
        if known is None:
            devices: set[jax.Device] = sharding.device_set
            found = {device.process_index for device in devices}
            known = self._ranges[id(sharding)] = (sharding, (min(found), max(found)))
        return known[1]

    def _look(self, sharding: jax.sharding.Sharding, parts: Shape) -> ArrayPlacement:
        places = _places(sharding, parts)
        index = self.team.index
        own: dict[Shape, int] = {}
        for shard, place in enumerate(place for process, place in places if process == index):
            own.setdefault(place, shard)
        held = _held(places)
        holders = {
            place: {process for process, found in held.items() if place in found} for place in own
        }
        cells: dict[ReplicaGroup, list[HeldShard]] = {}
        # In the same order on all processes.
        for place in sorted(own):
            crew = self._crew(holders[place])
            cells.setdefault(crew, []).append(HeldShard(place, own[place]))
        count = len({place for _, place in places})
        whole = {process for process, found in held.items() if len(found) == count}
        if self.team.mode == "local":
            # None writes for another one.
            whole = whole if len(whole) == len(held) else set()
        shares = tuple((crew, tuple(each)) for crew, each in cells.items())
        return ArrayPlacement(shares, bool(whole), self._crew(whole) if index in whole else None)

    def _crew(self, processes: set[int]) -> ReplicaGroup:
        """Return the crew of `processes`, this one among them."""
        members = (self.team.index,) if self.team.mode == "local" else tuple(sorted(processes))
        known = self._crews.get(members)
        if known is None:
            start = int(digest(repr(members).encode())[:8], 16) % len(members)
            rank = members.index(self.team.index)
            known = self._crews[members] = ReplicaGroup(members, rank, start)
        return known


@dataclass(frozen=True, slots=True)
class _Job:
    leaf: int
    chunks: int
    nbytes: int


@dataclass(slots=True)
class Partitioner:
    """What crews have to write, dealt out to their members."""

    _jobs: dict[ReplicaGroup, list[_Job]] = field(default_factory=dict)

    def add(self, crew: ReplicaGroup, leaf: int, chunks: int, nbytes: int) -> None:
        """Note that a crew has to write so many chunks of a leaf, of `nbytes` each."""
        self._jobs.setdefault(crew, []).append(_Job(leaf, chunks, nbytes))

    def own(self) -> Mapping[tuple[int, ReplicaGroup], range]:
        """Return by leaf and crew which of the chunks, in their order, this process writes."""
        return {
            (leaf, crew): share
            for crew, jobs in self._jobs.items()
            for leaf, share in _dealt(crew, jobs)
        }


def _dealt(crew: ReplicaGroup, jobs: list[_Job]) -> list[tuple[int, range]]:
    count = len(crew.members)
    if count == 1:
        return [(job.leaf, range(job.chunks)) for job in jobs]
    # How much every member has beyond what all of them have, and who comes first among equals.
    loads = [(0, (place - crew.start) % count, place) for place in range(count)]
    heapq.heapify(loads)
    found = []
    for job in sorted(jobs, key=lambda job: (-job.nbytes, job.leaf)):
        each, rest = divmod(job.chunks, count)
        taken = [heapq.heappop(loads) for _ in range(rest)]
        for load, turn, place in taken:
            heapq.heappush(loads, (load + job.nbytes, turn, place))
        mine = sum(place == crew.rank for _, _, place in taken)
        start = each * crew.rank + sum(place < crew.rank for _, _, place in taken)
        if each or mine:
            found.append((job.leaf, range(start, start + each + mine)))
    return found


def held_by(sharding: jax.sharding.Sharding, shape: Shape) -> dict[int, frozenset[Shape]]:
    """Return for every process the places, in the grid of shards, of what its devices hold."""
    return {
        process: frozenset(found)
        for process, found in _held(_places(sharding, _parts(sharding, shape))).items()
    }


def holders_of(sharding: jax.sharding.Sharding, shape: Shape, offset: Shape) -> tuple[int, ...]:
    """Return the processes that hold the element of an array at `offset`, for messages."""
    parts = _parts(sharding, shape)
    wanted = tuple(o * p // n for o, p, n in zip(offset, parts, shape, strict=True))
    places = _places(sharding, parts)
    return tuple(sorted({process for process, place in places if place == wanted}))


def _held(places: Iterable[tuple[int, Shape]]) -> dict[int, set[Shape]]:
    held: dict[int, set[Shape]] = {}
    for process, place in places:
        held.setdefault(process, set()).add(place)
    return held


def _parts(sharding: jax.sharding.Sharding, shape: Shape) -> Shape:
    shard = sharding.shard_shape(shape)
    return tuple(n // s if s else 1 for n, s in zip(shape, shard, strict=True))


def _places(sharding: jax.sharding.Sharding, parts: Shape) -> list[tuple[int, Shape]]:
    """Return for every device its process, and the place in the grid of shards of what it holds."""
    devices: Mapping[jax.Device, tuple[slice, ...]] = sharding.devices_indices_map(parts)
    return [
        (device.process_index, tuple(part.start or 0 for part in index))
        for device, index in devices.items()
    ]
