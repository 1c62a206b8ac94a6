"""Several items in one step: at once, under one budget, and with errors that say whose they are."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
from ckpt import errors
from ckpt._format.step_files import check_file_path
from ckpt.handlers import Deferred, ItemEntry, ItemReader, ItemWriter
from ckpt.handlers._pytree import PyTreeHandler
from ckpt.testing.compare import differences
from tests.support.conditions import until

MIB = 1 << 20
PATIENCE_S = 120


class Scripted:
    """A handler whose parts are the functions it is given."""

    name = "scripted"

    def __init__(
        self,
        stage: Callable[[ItemWriter], Awaitable[Any]] | None = None,
        commit: Callable[[ItemWriter], Awaitable[Any]] | None = None,
        load: Callable[[ItemReader], Awaitable[Any]] | None = None,
    ) -> None:
        self._stage, self._commit, self._load = stage, commit, load

    def accepts(self, item: Any) -> bool:
        return item is self

    async def stage(self, item: Any, writer: ItemWriter) -> Awaitable[ItemEntry]:
        if self._stage is not None:
            await self._stage(writer)

        async def commit() -> ItemEntry:
            if self._commit is not None:
                await self._commit(writer)
            return ItemEntry(handler=self.name)

        return Deferred(commit)

    async def load(self, entry: ItemEntry, like: Any, adapt: Any, reader: ItemReader) -> Any:
        return await self._load(reader) if self._load is not None else None


def save(path: Path, **items: Scripted) -> None:
    others = {"tree": {"w": np.arange(4)}}
    ckpt.sync.save(path, items=others | items, handlers=items)


class Meeting:
    """Where several coroutines wait for each other; alone, each would wait in vain."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, timeout=PATIENCE_S)

    async def join(self, tools: ItemWriter | ItemReader) -> None:
        await tools.in_thread(self._barrier.wait)


def test_items_are_staged_committed_and_loaded_at_the_same_time(tmp_path: Path) -> None:
    count = 4
    handlers = {
        f"item{number}": Scripted(stage.join, commit.join, load.join)
        for stage, commit, load in [(Meeting(count), Meeting(count), Meeting(count))]
        for number in range(count)
    }
    ckpt.sync.save(tmp_path / "x", items=handlers, handlers=handlers)
    found = ckpt.sync.load(tmp_path / "x", handlers=handlers)
    assert list(found) == list(handlers)


def test_many_items_share_a_budget_smaller_than_each_of_them(tmp_path: Path) -> None:
    items: dict[str, Any] = {
        f"tree{number}": {"w": jnp.full((3 * MIB // 4,), number, jnp.float32), "n": number}
        for number in range(6)
    }
    items |= {"text": "x" * (5 * MIB), "host": np.arange(MIB, dtype=np.int64)}
    threads_before = threading.active_count()
    with ckpt.sync.CheckpointManager(tmp_path, staging=ckpt.Staging(budget_bytes=MIB)) as mgr:
        for step in range(2):
            mgr.save(step, items=items).result()
        found = mgr.restore()
    assert list(found) == list(items)
    assert differences(items, found) == []
    assert threading.active_count() <= threads_before + 64


def test_lanes_are_shared_by_all_items(tmp_path: Path) -> None:
    """As many writes at once as for one item, each in a lane of its own."""
    writes: list[ckpt.types.Event] = []

    def note(event: ckpt.types.Event) -> None:
        if event.phase == "write":
            writes.append(event)

    items = {f"i{n}": {"w": jnp.full((MIB,), n, jnp.float32)} for n in range(9)} | {"t": "text"}
    with ckpt.sync.CheckpointManager(tmp_path, observers=[note]) as mgr:
        mgr.save(0, items=items).result()
    assert {event.lane for event in writes} <= set(range(4))
    assert len(writes) >= 10
    for lane in range(4):
        spans = sorted((e.began_ns, e.ended_ns) for e in writes if e.lane == lane)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_what_the_caller_passed_is_not_kept_alive_by_the_save(tmp_path: Path) -> None:
    import gc
    import weakref

    opened = threading.Event()

    async def wait(writer: ItemWriter) -> None:
        assert await writer.in_thread(opened.wait, PATIENCE_S)

    held = Scripted(commit=wait)
    array = jnp.arange(float(MIB))
    gone = weakref.ref(array)
    with ckpt.sync.CheckpointManager(tmp_path, handlers={"held": held}) as mgr:
        mgr.save(0, items={"tree": {"w": array}, "held": held})
        del array
        # A thread that has copied it may not have ended its call yet.
        until(lambda: gc.collect() >= 0 and gone() is None)
        opened.set()


async def fail(_: Any) -> None:
    raise ZeroDivisionError("meant")


async def refuse(_: Any) -> None:
    raise errors.InvalidArgumentError("meant")


async def wait_for_ever(_: Any) -> None:
    await anyio.sleep_forever()


@pytest.mark.parametrize("part", ["stage", "commit"])
def test_an_item_that_fails_stops_the_others_and_is_named(part: str, tmp_path: Path) -> None:
    waiting = Scripted(**{part: wait_for_ever})
    with pytest.raises(errors.HandlerError, match=r"'scripted' could not save it: ZeroDiv") as got:
        save(tmp_path / "x", waiting=waiting, bad=Scripted(**{part: fail}))
    assert got.value.item == "bad"
    assert isinstance(got.value.__cause__, ZeroDivisionError)
    with pytest.raises(errors.InvalidArgumentError, match="item 'bad': meant") as refused:
        save(tmp_path / "x", waiting=waiting, bad=Scripted(**{part: refuse}))
    assert refused.value.__cause__ is None or refused.value.item == "bad"
    assert list(tmp_path.iterdir()) == []


def test_a_load_that_fails_stops_the_others_and_is_named(tmp_path: Path) -> None:
    waiting, bad = Scripted(load=wait_for_ever), Scripted(load=fail)
    save(tmp_path / "x", waiting=waiting, bad=bad)
    with pytest.raises(errors.HandlerError, match=r"'scripted' could not load it: Zero") as caught:
        ckpt.sync.load(tmp_path / "x", handlers={"waiting": waiting, "bad": bad})
    assert caught.value.item == "bad"


def test_a_handler_that_fails_when_it_is_asked_is_named(tmp_path: Path) -> None:
    class Confused(Scripted):
        def accepts(self, item: Any) -> bool:
            raise LookupError("meant")

    with pytest.raises(errors.HandlerError, match=r"'scripted' could not say .* LookupError"):
        ckpt.sync.save(tmp_path / "x", {"a": 1}, handlers=[Confused()])


def test_a_cancellation_goes_through_handlers_as_it_is(tmp_path: Path) -> None:
    """A handler that translates its own errors cannot make one of it."""
    seen: list[BaseException] = []
    reached = threading.Event()

    async def wait(_: Any) -> None:
        try:
            reached.set()
            await anyio.sleep_forever()
        except BaseException as error:
            seen.append(error)
            raise

    waiting = Scripted(commit=wait)
    with ckpt.sync.CheckpointManager(tmp_path, handlers={"waiting": waiting}) as mgr:
        commit = mgr.save(0, items={"waiting": waiting})
        assert reached.wait(PATIENCE_S)
        commit.cancel()
        assert isinstance(commit.exception(), errors.CommitCancelledError)
        assert mgr.all_steps() == []
    assert len(seen) == 1
    assert not isinstance(seen[0], Exception)


@pytest.mark.parametrize("found", [None, 3, "entry"])
def test_a_handler_that_gives_something_else_is_named(found: Any, tmp_path: Path) -> None:
    class Wrong(Scripted):
        async def stage(self, item: Any, writer: ItemWriter) -> Any:
            async def commit() -> Any:
                return found

            return found if found != "entry" else commit()

    with pytest.raises(errors.HandlerError, match=r"which cannot be awaited|is no ItemEntry"):
        save(tmp_path / "x", wrong=Wrong())
    assert list(tmp_path.iterdir()) == []


def test_a_plain_coroutine_as_commit_is_closed_when_another_item_fails(tmp_path: Path) -> None:
    """Without the warning that it was never awaited, which is an error here."""

    class Plain(Scripted):
        async def stage(self, item: Any, writer: ItemWriter) -> Awaitable[ItemEntry]:
            async def commit() -> ItemEntry:
                return ItemEntry(handler=self.name)

            return commit()

    with pytest.raises(errors.HandlerError, match="Zero"):
        save(tmp_path / "x", plain=Plain(), bad=Scripted(stage=fail))
    save(tmp_path / "x", plain=Plain())


PATHS = ["z", "a/b/c.txt", "process_0-of-1.json", "metadata", ".hidden", "ü 1", "D", "x/_METADATA"]
WRONG_PATHS = [
    "",
    "/etc/passwd",
    "../ckpt.json",
    "a/../../b",
    "a//b",
    "a/",
    ".",
    "a/.",
    "a\\b",
    "a\0b",
    "a\n",
    "x" * 256,
    "/".join(["y" * 200] * 6),
    "_METADATA",
    "_sharding",
    "_strings.json",
    "array_metadatas/process_0",
    "commit_success.txt",
    "d/0123",
    "manifest.ocdbt",
    "ocdbt.process_0/x",
    "a.orbax-checkpoint-tmp-1",
    "\ud800",
    3,
    None,
]


def test_files_of_a_handler_come_back(tmp_path: Path) -> None:
    sizes = {path: 10**number for number, path in enumerate(PATHS)}

    async def write(writer: ItemWriter) -> None:
        for path, size in sizes.items():
            await writer.write_file(path, memoryview(bytearray(b"x" * size)))

    async def read(reader: ItemReader) -> Any:
        return {path: await reader.read_file(path) for path in sizes}

    thing = Scripted(commit=write, load=read)
    save(tmp_path / "x", thing=thing)
    found = ckpt.sync.load(tmp_path / "x", items=["thing"], handlers={"thing": thing})["thing"]
    assert {path: len(data) for path, data in found.items()} == sizes


@pytest.mark.parametrize("path", WRONG_PATHS, ids=ascii)
def test_a_path_that_leads_elsewhere_or_is_reserved_is_refused(path: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"path|string|format itself"):
        check_file_path(path)

    async def write(writer: ItemWriter) -> None:
        await writer.write_file(path, b"x")

    async def read(reader: ItemReader) -> Any:
        return await reader.read_file(path)

    with pytest.raises(errors.InvalidArgumentError, match="file of an item") as caught:
        save(tmp_path / "x", thing=Scripted(commit=write))
    assert caught.value.item == "thing"
    assert list(tmp_path.iterdir()) == []
    save(tmp_path / "x", thing=Scripted())
    with pytest.raises(errors.CorruptCheckpointError, match="file of an item") as damaged:
        ckpt.sync.load(tmp_path / "x", items=["thing"], handlers={"thing": Scripted(load=read)})
    assert damaged.value.item == "thing"


def test_a_file_is_written_once(tmp_path: Path) -> None:
    async def write(writer: ItemWriter) -> None:
        await writer.write_file("a", b"x")
        await writer.write_file("a", b"y")

    with pytest.raises(errors.InvalidArgumentError, match="'a' was written already"):
        save(tmp_path / "x", thing=Scripted(commit=write))


@pytest.mark.parametrize("size", [10, 3 * MIB])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "instead of"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "more than"),
        (lambda path: path.write_bytes(b"y" + path.read_bytes()[1:]), "digest"),
    ],
    ids=["gone", "cut", "longer", "changed"],
)
def test_a_damaged_file_names_item_and_file(
    size: int, damage: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    ckpt.sync.save(tmp_path / "x", items={"blob": b"x" * size, "tree": {"a": 1}})
    damage(tmp_path / "x" / "blob" / "data.bin")
    with pytest.raises(errors.CorruptCheckpointError, match=words) as caught:
        ckpt.sync.load(tmp_path / "x")
    assert caught.value.item == "blob"
    assert "blob/data.bin" in str(caught.value)
    assert ckpt.sync.load(tmp_path / "x", items=["tree"]) == {"tree": {"a": 1}}


NAMES = [
    "",
    ".",
    "..",
    "../up",
    "/abs",
    "a/b",
    "a\\b",
    "a\0b",
    "-x",
    ".hidden",
    "ü",
    "a b",
    "a\n",
    "x" * 101,
    "AUTO",
    "_CHECKPOINT_DELETION",
    "_CHECKPOINT_METADATA",
    "_METADATA",
    "_sharding",
    "_strings.json",
    "array_metadatas",
    "ckpt.json",
    "commit_success.txt",
    "manifest.ocdbt",
    "metrics",
    "ocdbt.process_0",
    "orbax.checkpoint",
    "a.orbax-checkpoint-tmp-1",
    3,
    None,
    b"a",
    ("a",),
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_name_that_no_item_may_have(name: Any, tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        with pytest.raises(errors.InvalidArgumentError, match="item name"):
            mgr.save(0, items={name: "text", "ok": {"a": 1}})
        assert [path.name for path in (tmp_path / "run").iterdir()] == []


@pytest.mark.parametrize("name", ["a", "0", "x" * 100, "A.b-c_d", "state", "default", "ckpt.json5"])
def test_a_name_that_an_item_may_have(name: str, tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", items={name: "text"})
    assert ckpt.sync.load(tmp_path / "x") == {name: "text"}


def cyclic() -> dict[str, Any]:
    made: dict[str, Any] = {}
    made["again"] = made
    return made


@pytest.mark.parametrize(
    "item",
    [
        print,
        lambda: None,
        jax.nn.relu,
        Path,
        {1, 2},
        {"a": {1, 2}},
        cyclic(),
        np.array([{}, None]),
        {"a": np.array(["x"])},
        object(),
        threading.Lock(),
    ],
    ids=lambda item: type(item).__name__,
)
def test_what_is_no_item_is_refused_and_nothing_is_left(item: Any, tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        with pytest.raises(errors.CheckpointError) as caught:
            mgr.save(0, items={"bad": item, "ok": {"a": 1}, "text": "x"})
        assert not isinstance(caught.value, errors.HandlerError)
        assert caught.value.item == "bad"
        assert [path.name for path in (tmp_path / "run").iterdir()] == []


class LateHandler(PyTreeHandler):
    """Takes its snapshot when the caller has its arrays back."""

    name = "late"

    async def stage(self, item: Any, writer: ItemWriter) -> Awaitable[ItemEntry]:
        async def commit() -> ItemEntry:
            return await (await PyTreeHandler().stage(item, writer))

        return Deferred(commit)


def test_a_handler_that_stages_too_late_fails_instead_of_waiting_for_memory(tmp_path: Path) -> None:
    staging = ckpt.Staging(budget_bytes=1 << 20)
    items = {"x": {"a": np.zeros(4 << 20, np.uint8)}, "y": {"a": np.zeros(1000 << 10, np.uint8)}}
    handlers = {"x": LateHandler()}
    with ckpt.sync.CheckpointManager(tmp_path, staging=staging, handlers=handlers) as mgr:
        for step in range(3):
            commit = mgr.save(step, items=items)
            with pytest.raises(errors.InvalidArgumentError, match=r"Handler\.stage") as caught:
                commit.result(60)
            assert caught.value.item == "x"
        assert mgr.all_steps() == []
