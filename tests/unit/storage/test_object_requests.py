"""What object stores are asked, how often, and for how long; what they must be able to do."""

from __future__ import annotations

import json
import time
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
import tensorstore as ts

import ckpt
import ckpt.sync
from ckpt._settings import Timeouts
from ckpt.errors import CorruptCheckpointError, StorageError
from ckpt.storage import StoreLimits, open_root
from ckpt.storage._object.config import GCS, S3, Memory
from ckpt.storage._object.connection import Connection, connect
from ckpt.storage._object.storage import ObjectStorage
from ckpt.testing.conformance.store_cases import assert_whole, publish, write
from tests.unit.storage.failing_store import FailingStore


class CountingStore:
    """Counts the requests of all who use it, by kind; remembers what was listed."""

    def __init__(self, store: Any, heeds: Callable[[bytes], bool] = lambda _: True) -> None:
        self.store = store
        self.heeds = heeds
        self.counts: Counter[str] = Counter()
        self.listed: list[bytes] = []

    def read(self, key: str, *, byte_range: slice | None = None) -> Any:
        self.counts["read"] += 1
        return self.store.read(key, byte_range=byte_range)

    def write(self, key: str, value: bytes | None, *, if_equal: bytes | None = None) -> Any:
        self.counts["delete" if value is None else "write"] += 1
        condition = if_equal if if_equal is None or self.heeds(if_equal) else None
        return self.store.write(key, value, if_equal=condition)

    def list(self, range: Any = None) -> Any:
        self.counts["list"] += 1
        self.listed.append(range.inclusive_min)
        return self.store.list(range)

    def taken(self) -> int:
        total = self.counts.total()
        self.counts.clear()
        self.listed.clear()
        return total


def memory() -> Memory:
    return Memory(f"memory://{uuid.uuid4().hex}/run")


def opened(config: Memory | S3 | GCS, store: Any, lease: float = 600.0) -> ObjectStorage:
    return ObjectStorage(config, Timeouts(lease=lease), open_store=lambda: (store, store))


def counted(config: Memory) -> tuple[ObjectStorage, CountingStore]:
    store = CountingStore(connect(config).open()[0])
    return opened(config, store), store


def test_many_small_leaves_take_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    config = memory()
    store = CountingStore(connect(config).open()[0])
    monkeypatch.setattr(Connection, "open", lambda _: (store, store))
    state = {f"leaf{number:04}": np.full(64, number) for number in range(5000)}
    with ckpt.sync.CheckpointManager(config) as mgr:
        store.taken()
        mgr.save(1, state).result()
        assert store.taken() <= 40
        found = mgr.restore(1)
        assert store.taken() <= 60
        assert all(np.array_equal(found[name], array) for name, array in state.items())
        mgr.all_steps()
        assert store.taken() <= 5


def test_what_a_run_keeps_costs_a_read_at_the_first_save_and_a_write_if_it_is_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = memory()
    store = CountingStore(connect(config).open()[0])
    monkeypatch.setattr(Connection, "open", lambda _: (store, store))

    def saving(preservation: Any, steps: int = 1) -> Counter[str]:
        with ckpt.sync.CheckpointManager(config, keep=preservation) as mgr:
            for step in range(steps):
                mgr.save(step, {"w": np.ones(2)}, if_exists="replace")
            mgr.wait_until_finished()
            assert mgr.all_steps()
        counts = store.counts.copy()
        store.taken()
        return counts

    saving(ckpt.keep.All(), steps=2)
    opened = saving(ckpt.keep.All(), steps=0)
    assert saving(ckpt.keep.Latest(3), steps=0) == opened
    saving(ckpt.keep.Latest(4))
    usual = saving(ckpt.keep.Latest(4))
    first = saving(ckpt.keep.Latest(3))
    again = saving(ckpt.keep.Latest(3))
    assert first - usual == Counter({"write": 1})
    assert again == usual
    with monkeypatch.context() as patch:
        patch.setattr("ckpt._steps.removal.recorded_policy.record_policy", _nothing)
        without = saving(ckpt.keep.Latest(3))
    assert again - without == Counter({"read": 1})


async def _nothing(*_: object) -> None:
    pass


def test_a_list_of_a_large_root_does_not_grow_with_its_objects() -> None:
    async def main() -> None:
        config = memory()
        storage, store = counted(config)
        for step in ("1", "2"):
            await publish(storage, step)
        raw = connect(config).open()[0]
        for number in range(1200):
            raw.write(f"1/other/{number}", b"x").result()
        assert await storage.step_dirs() == ["1", "2"]
        assert store.listed[-1] == b""
        store.taken()
        # Another one commits and deletes: that is seen at once, and without listing the steps.
        other, _ = counted(config)
        await publish(other, "3")
        await other.remove("2")
        assert await storage.step_dirs() == ["1", "3"]
        assert store.listed == [b".ckpt-steps/"]
        # What another tool has copied is seen by the next whole list.
        raw.write("7/ckpt.json", b"{}").result()
        storage._lists._next = 0.0
        assert await storage.step_dirs() == ["1", "3", "7"]
        assert await storage.step_dirs() == ["1", "3", "7"]
        assert store.listed[-1] == b".ckpt-steps/"

    anyio.run(main)


def test_attempts_take_a_list_and_a_request_for_each() -> None:
    async def main() -> None:
        config = memory()
        storage, store = counted(config)
        attempt = await storage.begin("1")
        store.taken()
        [entry] = await storage.attempts()
        assert store.taken() == 2
        assert (entry.step_dir, entry.id, entry.is_live) == ("1", attempt.id, True)
        # Another process has not watched it yet, and its writer was silent for long.
        key = f".ckpt-attempts/1.{attempt.id}"
        raw = connect(config).open()[0]
        content = json.loads(raw.read(key).result().value)
        raw.write(key, json.dumps(content | {"renewed": time.time() - 1000}).encode()).result()
        other, _ = counted(config)
        [entry] = await other.attempts()
        assert entry.is_live is None
        assert entry.silent_seconds is not None
        assert entry.silent_seconds > 990
        assert await other.sweep() == []

    anyio.run(main)


@pytest.mark.parametrize("ignored", ["all", "new ones", "changed ones"])
def test_a_store_that_ignores_conditions_is_refused(ignored: str) -> None:
    async def main() -> None:
        config = memory()
        missing = connect(config).open()[0].read("none").result().stamp.generation

        def heeds(condition: bytes) -> bool:
            if ignored == "all":
                return False
            return (condition == missing) is not (ignored == "new ones")

        store = CountingStore(connect(config).open()[0], heeds)
        # Of a memory it is known; so this one says that it is an S3.
        named = S3("s3://bucket/run", endpoint="http://127.0.0.1:1")
        storage = ObjectStorage(named, Timeouts(), open_store=lambda: (store, store))
        with pytest.raises(StorageError, match="ignores the conditions of writes"):
            await storage.prepare()
        assert store.store.list().result() == []
        alone = ObjectStorage(
            S3(named.url, endpoint=named.endpoint, single_writer=True),
            Timeouts(),
            open_store=lambda: (store, store),
        )
        store.taken()
        await alone.prepare()
        assert store.taken() == 0

    anyio.run(main)


def test_a_store_that_heeds_conditions_is_probed_once() -> None:
    async def main() -> None:
        store = CountingStore(connect(memory()).open()[0])
        named = S3("s3://bucket/run", endpoint="http://127.0.0.1:1")
        storage = ObjectStorage(named, Timeouts(), open_store=lambda: (store, store))
        await storage.prepare()
        assert store.taken() <= 7
        await storage.prepare()
        assert store.taken() == 0
        assert store.store.list().result() == []

    anyio.run(main)


def test_a_large_read_is_made_of_parts_at_once() -> None:
    async def main() -> None:
        config = memory()
        storage, store = counted(config)
        attempt = await publish(storage, "1", "large", nbytes=(20 << 20) + 3)
        await assert_whole(storage, "1", "large")
        store.taken()
        block = bytearray(20 << 20)
        await storage.read_block(f"1/{attempt.folder}", "item/d/0", 3, memoryview(block))
        assert store.taken() == 3
        with pytest.raises(CorruptCheckpointError, match="shorter than"):
            await storage.read_block(f"1/{attempt.folder}", "item/d/0", 4, memoryview(block))
        await storage.read_block(f"1/{attempt.folder}", "item/d/0", 0, memoryview(b""))

    anyio.run(main)


def test_a_file_that_no_request_can_carry_is_refused() -> None:
    async def main() -> None:
        storage, store = counted(memory())
        attempt = await storage.begin("1")
        storage._keys.limits = StoreLimits(largest_bytes=1000)  # type: ignore[misc]
        store.taken()
        with pytest.raises(StorageError, match="at most 1000 at once"):
            await storage.write_block(attempt, "d/x", memoryview(bytes(1001)))
        assert store.taken() == 0

    anyio.run(main)


def test_paths_that_lead_elsewhere_are_refused() -> None:
    async def main() -> None:
        storage, store = counted(memory())
        for path in ("../2/ckpt.json", "a//b", "./a", "a/.."):
            with pytest.raises(CorruptCheckpointError, match="not a valid path"):
                await storage.read("1", path, 100)
            with pytest.raises(CorruptCheckpointError, match="not a valid path"):
                await storage.read_block("1", path, 0, memoryview(bytearray(1)))
        assert store.taken() == 0

    anyio.run(main)


@pytest.mark.parametrize(
    "ask",
    [
        lambda storage: storage.step_dirs(),
        lambda storage: storage.exists("1"),
        lambda storage: storage.read("1", "ckpt.json", 100),
        lambda storage: storage.begin("1"),
        lambda storage: storage.notes("metadata"),
        lambda storage: storage.put_note("metadata/x", b"x", replace=False),
        lambda storage: storage.sweep(),
    ],
)
def test_a_silent_store_is_not_waited_for_longer_than_said(ask: Callable[[Any], Any]) -> None:
    async def main() -> None:
        config = Memory(memory().url, request_timeout=0.05)
        # With it everything after it fails, so nothing ends well.
        store = FailingStore(connect(config).open()[0], 0, "hangs")
        storage = opened(config, _Silent(store))
        with anyio.fail_after(20), pytest.raises(StorageError) as caught:
            await ask(storage)
        assert config.url in str(caught.value)
        assert "no answer within" in str(caught.value)

    anyio.run(main)


class _Silent:
    """Never answers."""

    def __init__(self, store: FailingStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        self._store.count = 0
        return getattr(self._store, name)


def test_who_waits_for_a_deletion_only_looks() -> None:
    async def main() -> None:
        config = Memory(memory().url, request_timeout=0.5)
        deleter, _ = counted(config)
        await publish(deleter, "1", "old")
        # It stops after the tombstone.
        store = FailingStore(connect(config).open()[0], 3, "gone")
        assert await opened(config, store).remove("1")
        counting = CountingStore(connect(config).open()[0])
        await publish(opened(config, counting), "1", "new")
        # Two files, the name, the record three times, the manifest where there is none, and in
        # place of the tombstone; and what its predecessor does no more.
        assert counting.counts["write"] <= 8
        await assert_whole(deleter, "1", "new")

    anyio.run(main)


def test_who_joins_an_attempt_of_another_store_is_told_which_one_it_sees() -> None:
    async def main() -> None:
        attempt = await counted(memory())[0].begin("1")
        there = S3("s3://bucket/run", endpoint="http://127.0.0.1:1")
        store = CountingStore(connect(memory()).open()[0])
        with pytest.raises(StorageError, match="process 0 has begun does not exist here") as caught:
            await opened(there, store).join("1", attempt.id)
        assert "s3://bucket/run/1 at http://127.0.0.1:1: " in str(caught.value)
        assert "memory:// is for one process" in str(caught.value)

    anyio.run(main)


def test_what_others_write_into_a_step_stays_when_it_goes() -> None:
    async def main() -> None:
        config = memory()
        storage, _ = counted(config)
        raw = connect(config).open()[0]
        await publish(storage, "1", "old")
        raw.write("1/notes.txt", b"mine").result()
        other = await write(storage, "1", "under way")
        await storage.remove("1")
        left = {key.decode().removeprefix("run/") for key in raw.list().result()}
        assert "1/notes.txt" in left
        # So do the data of who writes it anew at the same time.
        await storage.publish(other, overwrite=False)
        await assert_whole(storage, "1", "under way")

    anyio.run(main)


class Unreachable(CountingStore):
    """Nobody answers."""

    def write(self, key: str, value: bytes | None, *, if_equal: bytes | None = None) -> Any:
        self.counts["write"] += 1
        promise: ts.Promise
        future: ts.Future
        promise, future = ts.Promise.new()
        promise.set_exception(ValueError("UNAVAILABLE: CURL error Could not connect to server"))
        return future


class Slow(CountingStore):
    """Each read is answered when the test says so."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.waiting: list[ts.Promise] = []
        self.most = 0

    def read(self, key: str, *, byte_range: slice | None = None) -> Any:
        promise: ts.Promise
        future: ts.Future
        promise, future = ts.Promise.new()
        self.waiting.append(promise)
        self.most = max(self.most, len(self.waiting))
        return future


def in_a_bucket(kind: type[S3] | type[GCS], **settings: Any) -> Any:
    if kind is S3:
        return S3("s3://bucket/run", endpoint="http://127.0.0.1:1", **settings)
    return GCS("gs://bucket/run", **settings)


@pytest.mark.parametrize("kind", [S3, GCS])
def test_a_conditional_write_is_tried_again_as_often_as_said(kind: type[S3] | type[GCS]) -> None:
    async def main() -> None:
        store = Unreachable(connect(memory()).open()[0])
        with pytest.raises(StorageError, match="Could not connect"):
            await opened(in_a_bucket(kind, retries=0), store).put_note("a/n", b"x", replace=False)
        assert store.counts["write"] == 1

    anyio.run(main)


async def answered(storage: ObjectStorage, store: Slow, answer: Any, count: int) -> None:
    """Ask some times at once; each is answered when no more comes in."""
    async with anyio.create_task_group() as tasks:
        for number in range(count):
            tasks.start_soon(storage._keys.get, str(number))
        for _ in range(count):
            while not store.waiting:
                await anyio.lowlevel.checkpoint()
            await anyio.wait_all_tasks_blocked()
            store.waiting.pop().set_result(answer)


@pytest.mark.parametrize("kind", [S3, GCS])
def test_no_more_requests_are_in_flight_than_said(kind: type[S3] | type[GCS]) -> None:
    async def main() -> None:
        store = Slow(connect(memory()).open()[0])
        storage = opened(in_a_bucket(kind, concurrency=2), store)
        missing = store.store.read("none").result()
        with anyio.fail_after(20):
            # The first request opens the store, in a thread.
            await answered(storage, store, missing, 1)
            await answered(storage, store, missing, 5)
        assert store.most == 2

    anyio.run(main)


@pytest.mark.parametrize("kind", [S3, GCS])
def test_a_single_writer_needs_no_conditions(kind: type[S3] | type[GCS]) -> None:
    async def main() -> None:
        store = CountingStore(connect(memory()).open()[0])
        await opened(in_a_bucket(kind, single_writer=True), store).prepare()
        assert store.taken() == 0

    anyio.run(main)


@pytest.mark.parametrize("kind", [S3, GCS])
def test_a_store_copies_no_objects_if_told_not_to(kind: type[S3] | type[GCS]) -> None:
    assert open_root(in_a_bucket(kind)).traits.shares_files
    assert not open_root(in_a_bucket(kind, server_side_copies=False)).traits.shares_files


def test_a_root_is_opened_with_the_lease_that_is_given(tmp_path: Any) -> None:
    for place in (tmp_path, memory()):
        assert open_root(place, Timeouts(lease=7.0)).traits.lease_seconds == 7.0


def test_a_root_is_made_only_if_it_may_be(tmp_path: Any) -> None:
    async def main() -> None:
        for place in (tmp_path / "run", memory()):
            with pytest.raises(StorageError, match="may not be made here"):
                await open_root(place, create=False).prepare()
            await open_root(place).prepare()

    anyio.run(main)
