"""Reads that processes divide among them, and the exchange of their bytes over devices.

Read groups: processes that need the same bytes divide the reads among them. Pure. Processes whose
devices hold the same shards of an array need the same chunks of it. They form a group. Each member
computes the same stream of bytes from data that all of them have. The stream is cut into batches,
and a batch into as many shares as the group has members. Each member reads its share; then all of
them exchange.

The exchange over devices: host bytes of every process go to all processes of its group. The
exchange is one program on the devices of all processes, an all-gather. Any thread may compile it,
but it runs on the caller's thread, as training programs do, so that all processes run their
programs in the same order.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import anyio
import jax
import msgspec
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from ckpt._engine.memory.arena import Buffers
from ckpt._format.manifest_head import digest
from ckpt._plan.chunk_reads import ByteRange
from ckpt._plan.chunking import regions_by_process
from ckpt._plan.targets import ArrayRead
from ckpt._runtime.futures import CallingThread
from ckpt._runtime.threads import run_in_thread
from ckpt.errors import CoordinationError, CoordinationTimeoutError

T = TypeVar("T")
Array = np.ndarray[Any, Any]
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


_spec: Callable[..., PartitionSpec] = PartitionSpec

# CPU devices take over memory at addresses of this alignment without a copy.
_ALIGNMENT = 64


class DeviceExchange:
    """Exchanges shares of one size among the members of every group of a grouping."""

    def __init__(
        self,
        grouping: Grouping,
        process: int,
        nbytes: int,
        buffers: Buffers,
        caller: CallingThread,
        seconds: float,
    ) -> None:
        """Prepare to exchange at least `nbytes` in every group.

        Args:
            grouping: The groups; the same on all processes.
            process: Number of this process.
            nbytes: The largest number of bytes of a batch, the same on all processes.
            buffers: Source of the memory that is exchanged.
            caller: Thread that runs the program.
            seconds: Time limit of the exchange once all processes have agreed to run it.
        """
        self._grouping = grouping
        self._process = process
        self._lanes = grouping.lanes
        unit = grouping.members * self._lanes * _ALIGNMENT
        self._piece = -(-nbytes // unit) * _ALIGNMENT
        self._buffers = buffers
        self._caller = caller
        self._seconds = seconds
        self._program: Callable[[jax.Array], jax.Array] | None = None

    @property
    def share_bytes(self) -> int:
        """Bytes that every process contributes."""
        return self._piece * self._lanes

    @property
    def nbytes(self) -> int:
        """Bytes that every process receives: the shares of its group, one after the other."""
        return self.share_bytes * self._grouping.members

    def share(self) -> Array:
        """Return memory for the share of this process, with undefined content."""
        return self._buffers.empty((self.share_bytes,), np.dtype(np.uint8))

    async def prepare(self) -> None:
        """Compile the program without waiting for other processes.

        Raises:
            CoordinationError: jax cannot compile it.
        """
        self._program = await self._attempt(partial(_in_thread, self._compile))

    async def put(self, share: Array) -> jax.Array:
        """Bring the share of this process to its devices without waiting for other processes.

        `share` must not change from now on.

        Raises:
            CoordinationError: jax failed; the devices may lack the memory.
        """
        given: jax.Array = await self._attempt(partial(_in_thread, self._put, share))
        return given

    async def exchange(self, given: jax.Array) -> Array:
        """Return the shares of the group; all processes call this once all have agreed to.

        Shield this call from cancellation: the others wait for this process.

        Args:
            given: The result of `put`.

        Raises:
            CoordinationError: A process has ended, or jax failed.
            CoordinationTimeoutError: The exchange takes too long.
        """
        with anyio.move_on_after(self._seconds):
            gathered: Array = await self._attempt(partial(self._exchange, given))
            return gathered
        raise CoordinationTimeoutError(
            f"exchanging what was read over the devices: not done within {self._seconds:g} s, "
            f"though all processes were ready; process {self._process} cannot tell which one does "
            "not take part. The devices may go on to wait for it, so end all processes and start "
            "them again; raise Timeouts(coordination=...) if the network is only slow"
        )

    async def _exchange(self, given: jax.Array) -> Array:
        assert self._program is not None
        taken = await self._caller.run(partial(self._program, given))
        return await _in_thread(self._fetch, taken)

    async def _attempt(self, act: Callable[[], Any]) -> Any:
        try:
            return await act()
        except (RuntimeError, ValueError) as error:
            # jax raises RuntimeError for failures of devices and programs.
            raise CoordinationError(
                f"exchanging what was read over the devices failed in process {self._process}: "
                f"{error!s:.300}. Restore without broadcast_bytes= where the devices cannot"
            ) from error

    def _shape(self) -> tuple[int, int, int, int]:
        grouping = self._grouping
        return (len(grouping.groups), grouping.members, self._lanes, self._piece)

    def _compile(self) -> Callable[[jax.Array], jax.Array]:
        apart, together = self._shardings()
        everywhere = NamedSharding(apart.mesh, _spec())
        abstract: Callable[..., Any] = jax.ShapeDtypeStruct
        given = abstract(self._shape(), np.uint8, sharding=apart)
        # Adding zero makes XLA's CPU client run the program on a thread of its own. The client
        # considers programs of less than 1,000 operations cheap (PjRtCpuExecutable in
        # xla/pjrt/cpu/cpu_client.cc) and runs them on the calling thread, which would then wait for
        # all processes.
        program = jax.jit(lambda array, zero: array + zero, out_shardings=together)
        compiled = program.lower(given, abstract((), np.uint8, sharding=everywhere)).compile()
        # Put on the devices in advance: the caller's thread may have a transfer guard.
        zeros = jax.device_put([np.uint8(0)] * self._lanes, self._places())
        zero = jax.make_array_from_single_device_arrays((), everywhere, zeros)
        return lambda array: compiled(array, zero)

    def _shardings(self) -> tuple[NamedSharding, NamedSharding]:
        grouping = self._grouping
        devices = np.empty(self._shape()[:3], dtype=object)
        for group, members in enumerate(grouping.groups):
            for member, process in enumerate(members):
                devices[group, member] = grouping.devices[process][: self._lanes]
        mesh = Mesh(devices, ("group", "member", "lane"))
        apart = NamedSharding(mesh, _spec("group", "member", "lane"))
        return apart, NamedSharding(mesh, _spec("group", None, "lane"))

    def _places(self) -> list[SingleDeviceSharding]:
        devices = self._grouping.devices[self._process][: self._lanes]
        return [SingleDeviceSharding(device) for device in devices]

    def _put(self, share: Array) -> jax.Array:
        pieces = list(share.reshape(self._lanes, 1, 1, 1, self._piece))
        apart, _ = self._shardings()
        return jax.make_array_from_single_device_arrays(
            self._shape(), apart, jax.device_put(pieces, self._places())
        )

    def _fetch(self, taken: jax.Array) -> Array:
        lanes = sorted(taken.addressable_shards, key=lambda shard: shard.index[2].start or 0)
        if len(lanes) == 1:
            return np.asarray(lanes[0].data).reshape(-1)
        shape = (self._grouping.members, self._lanes, self._piece)
        memory = self._buffers.empty(shape, np.dtype(np.uint8))
        for number, lane in enumerate(lanes):
            memory[:, number] = np.asarray(lane.data)[0, :, 0]
            # jax keeps its host copy as long as the array lives.
            lane.data.delete()
        return memory.reshape(-1)


async def _in_thread(function: Callable[..., T], *args: Any) -> T:
    # The thread is abandoned on cancellation, since it may wait for devices forever.
    return await run_in_thread(partial(function, *args), abandon_on_cancel=True)
