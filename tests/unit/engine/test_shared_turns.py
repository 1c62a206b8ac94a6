"""Shared reads where one process is cancelled, or fails, at any moment: all exchange, or none."""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from msgspec.structs import replace

from ckpt._engine.restore.step_files import BlockReader
from ckpt._events import Event, EventRecorder
from ckpt._format.leaf_table import LeafEntry
from ckpt._job import shared_reads as broadcast
from ckpt._job.agreement.peers import Peers
from ckpt._job.read_groups import Grouping
from ckpt._job.shared_reads import Broadcast, FileReader, SharedReads
from ckpt._plan.chunk_reads import plan_chunk_reads, plan_requests
from ckpt._plan.targets import ArrayRead, ArrayTarget
from ckpt.coordination._jobs import MemoryKeyValues
from ckpt.errors import (
    CheckpointError,
    CommitCancelledError,
    CoordinationError,
    CorruptCheckpointError,
    StorageError,
)
from docs.explanation.scaling.fake_devices import devices_of

LIMIT = 60.0
COUNT, MEMBERS = 4, 2
# The first group needs three short chunks, and the other one three long ones: in two rounds.
LENGTHS = [1000] * 3 + [200_000] * 3
OFFSETS = [sum(LENGTHS[:number]) for number in range(len(LENGTHS))]
STORED = np.random.default_rng(0).integers(0, 256, sum(LENGTHS), np.uint8)
LEAF = LeafEntry(
    name="a",
    kind="jax",
    dtype="uint8",
    shape=[len(LENGTHS), max(LENGTHS)],
    chunks=[1, max(LENGTHS)],
    codec="zstd",
    digests=["0" * 32] * len(LENGTHS),
    offsets=OFFSETS,
    lengths=LENGTHS,
)


@dataclass
class Rooms:
    """Where processes of this one thread exchange: each waits until all are there."""

    given: dict[int, dict[int, Any]] = field(default_factory=dict)
    full: dict[int, anyio.Event] = field(default_factory=dict)
    alone: list[int] = field(default_factory=list)
    # Memory that was still in use at the next exchange.
    kept: list[int] = field(default_factory=list)
    moved: int = 0


@dataclass
class Exchange:
    """Takes the place of the devices."""

    rooms: Rooms
    grouping: Grouping
    process: int
    nbytes: int
    buffers: Any
    caller: Any
    seconds: float
    turn: int = 0
    memory: Callable[[], Any] = lambda: None

    def share(self) -> Any:
        return np.zeros(-(-self.nbytes // MEMBERS), np.uint8)

    async def prepare(self) -> None:
        await anyio.lowlevel.checkpoint()

    async def put(self, share: Any) -> Any:
        await anyio.lowlevel.checkpoint()
        return share

    async def exchange(self, given: Any) -> Any:
        if self.memory() is not None:
            self.rooms.kept.append(self.process)
        room = self.rooms.given.setdefault(self.turn, {})
        full = self.rooms.full.setdefault(self.turn, anyio.Event())
        self.turn += 1
        room[self.process] = given
        if len(room) == COUNT:
            full.set()
        with anyio.move_on_after(self.seconds):
            await full.wait()
            assert len({len(each) for each in room.values()}) == 1
            found = np.concatenate([room[each] for each in self.grouping.group_of(self.process)])
            self.memory = weakref.ref(found)
            return found
        self.rooms.alone.append(self.process)
        raise CoordinationError("left alone")


class Requests:
    """What processes share, as one of them sees it; something happens at one of its requests."""

    def __init__(self, values: MemoryKeyValues, happens: Callable[[int], None]) -> None:
        self._values = values
        self._happens = happens
        self.count = 0
        self.is_armed = False

    def __getattr__(self, name: str) -> Any:
        return partial(self._ask, getattr(self._values, name))

    async def _ask(self, request: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        # Before it is made, and when it has been: each is a moment of its own.
        self._moment()
        await anyio.lowlevel.checkpoint()
        found = await request(*args)
        self._moment()
        await anyio.lowlevel.checkpoint()
        return found

    def _moment(self) -> None:
        if self.is_armed:
            self._happens(self.count)
            self.count += 1


class Moving(Peers):
    """Counts of which bytes the others are told."""

    moved = 0

    def advance(self, nbytes: int) -> None:
        self.moved += nbytes
        super().advance(nbytes)


class Job:
    def __init__(self, index: int, values: Any) -> None:
        self.process_index, self.process_count = index, COUNT
        self._values = values

    def key_values(self) -> Any:
        return self._values


async def restored(peers: Peers, read_block: FileReader, recorder: EventRecorder) -> Any:
    """Return what one process reads together with the others."""
    found = np.zeros_like(STORED)
    mesh = Mesh(devices_of(COUNT, 1).reshape(-1, MEMBERS), ("x", "y"))
    halves = NamedSharding(mesh, PartitionSpec("x"))
    target = ArrayTarget("jax", np.dtype(np.uint8), halves)
    read = ArrayRead(target, tuple(LEAF.shape), "uint8", 0)
    # As a process of the job plans it: what its own group needs.
    whole = replace(read, target=ArrayTarget("numpy", target.dtype))
    chunks = [
        each
        for each in plan_chunk_reads([LEAF], [whole])
        if each.number // 3 == peers.index // MEMBERS
    ]

    async def act(operation: Any) -> None:
        shared = Broadcast(peers, operation, 1 << 20, None)  # type: ignore[arg-type]
        grouping = shared.groupings([LEAF], [read], is_common=True)["a"]
        requests = plan_requests(chunks, ["d/a"], 1)

        async def take(block: BlockReader, numbers: range) -> None:
            for source in (requests[number].source for number in numbers):
                place = found[source.start : source.end].data
                await block(source.path, source.start, place, lambda: None)

        reads = SharedReads(shared, read_block, None, recorder)  # type: ignore[arg-type]
        await reads.read(grouping, requests, take)
        await shared.finish()

    await peers.all_or_none("restore", "the restore", act)
    return [found[OFFSETS[chunk.number] :][: LENGTHS[chunk.number]] for chunk in chunks]


async def run(
    monkeypatch: pytest.MonkeyPatch,
    process: int,
    moment: int | None,
    fails: int | None = None,
    lost: int | None = None,
    observers: tuple[Callable[[Event], None], ...] = (),
) -> tuple[list[Any], list[int], int]:
    """Return what all processes met, who was left alone, and how many moments there were.

    `process` is cancelled at a moment, or the read fails of which that is the number; or the byte
    is not there that is `lost`. The `observers` are told what is read and exchanged.
    """
    rooms, values = Rooms(), MemoryKeyValues()
    monkeypatch.setattr(broadcast, "DeviceExchange", partial(Exchange, rooms))
    scopes = [anyio.CancelScope() for _ in range(COUNT)]
    outcomes: list[Any] = ["cancelled"] * COUNT
    reads = [0] * COUNT

    def happens(index: int, now: int) -> None:
        if index == process and now == moment:
            scopes[index].cancel()

    views = [Requests(values, partial(happens, index)) for index in range(COUNT)]

    async def one(index: int) -> None:
        async def read_block(path: str, offset: int, target: memoryview) -> None:
            await anyio.lowlevel.checkpoint()
            reads[index] += 1
            if (index, reads[index]) == (process, fails):
                raise StorageError("the store is gone")
            if lost is not None and offset <= lost < offset + len(target):
                raise CorruptCheckpointError("there is less than there should be")
            target[:] = STORED[offset : offset + len(target)].data

        peers = Moving(Job(index, views[index]), LIMIT, "root", 1 << 20)
        # What opens them is another matter.
        await peers.all_or_none("open", "the opening", lambda _: anyio.lowlevel.checkpoint())
        views[index].is_armed = True
        with scopes[index]:
            try:
                outcomes[index] = await restored(
                    peers, read_block, EventRecorder("restore", 1, observers)
                )
            except CheckpointError as error:
                outcomes[index] = error
        rooms.moved += peers.moved

    async with anyio.create_task_group() as tasks:
        for index in range(COUNT):
            tasks.start_soon(one, index)
    assert not rooms.kept
    if all(isinstance(outcome, list) for outcome in outcomes):
        # Each byte is read once, and the others hear of it: one who reads slowly is waited for.
        assert rooms.moved == len(STORED)
    return outcomes, rooms.alone, views[process].count


def is_whole(index: int, outcome: Any) -> bool:
    first = 3 * (index // MEMBERS)
    return isinstance(outcome, list) and all(
        (found == STORED[OFFSETS[number] :][: LENGTHS[number]]).all()
        for number, found in enumerate(outcome, first)
    )


def test_all_find_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes, alone, _ = anyio.run(run, monkeypatch, 0, None)
    assert [is_whole(*each) for each in enumerate(outcomes)] == [True] * COUNT
    assert not alone


@pytest.mark.parametrize("process", [0, 1, 3])
def test_nobody_exchanges_alone_whenever_one_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, process: int
) -> None:
    _, _, moments = anyio.run(run, monkeypatch, process, None)
    for moment in range(moments):
        outcomes, alone, _ = anyio.run(run, monkeypatch, process, moment)
        assert not alone, f"cancelled at moment {moment} of {moments}"
        for index, outcome in enumerate(outcomes):
            # What comes to its end in spite of it is whole.
            others = CommitCancelledError if index != process else (str, CommitCancelledError)
            assert is_whole(index, outcome) or isinstance(outcome, others)


@pytest.mark.parametrize(("process", "fails"), [(0, 1), (2, 1), (2, 2), (3, 1)])
def test_an_error_of_one_is_that_of_all_and_nobody_exchanges_alone(
    monkeypatch: pytest.MonkeyPatch, process: int, fails: int
) -> None:
    outcomes, alone, _ = anyio.run(run, monkeypatch, process, None, fails)
    assert [type(outcome) for outcome in outcomes] == [StorageError] * COUNT
    assert not alone


@pytest.mark.parametrize("lost", [0, OFFSETS[3] + 5, len(STORED) - 1])
def test_what_is_missing_is_told_with_its_leaf(monkeypatch: pytest.MonkeyPatch, lost: int) -> None:
    outcomes, alone, _ = anyio.run(run, monkeypatch, 0, None, None, lost)
    for outcome in outcomes:
        assert isinstance(outcome, CorruptCheckpointError)
        assert "leaf 'a'" in str(outcome)
    assert not alone


@pytest.mark.parametrize(("phase", "told"), [("fetch", len(STORED)), ("exchange", None)])
def test_what_is_read_for_others_and_exchanged_is_told(
    monkeypatch: pytest.MonkeyPatch, phase: str, told: int | None
) -> None:
    events: list[Event] = []
    outcomes, _, _ = anyio.run(run, monkeypatch, 0, None, None, None, (events.append,))
    assert all(is_whole(*each) for each in enumerate(outcomes))
    moved = [event.nbytes for event in events if event.phase == phase]
    assert moved
    # Each byte is read once by somebody.
    assert told is None or sum(moved) == told
