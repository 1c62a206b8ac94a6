"""Items of which every process has its own: kept apart, given back, never dealt out anew."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import ckpt
import ckpt.sync
from ckpt._engine.restore.context import RestoreContext
from ckpt._engine.restore.pipeline import restore_items
from ckpt._format.leaf_table import LeafEntry, LeafTable
from ckpt._format.manifest import Manifest, encode
from ckpt._format.manifest_head import FileEntry, digest
from ckpt._format.per_process import apart, combine, own_path, pick, renamed
from ckpt._plan.adapt import Adapt
from ckpt._settings import Staging
from ckpt._steps.restore_arguments import wanted_items
from ckpt._steps.restore_options import RestoreOptions
from ckpt._steps.service import make_engine
from ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    InvalidArgumentError,
    TargetMismatchError,
    UnsupportedLeafError,
)
from ckpt.handlers import Deferred, ItemEntry
from ckpt.handlers._base import is_per_process
from ckpt.handlers._registry import find_handlers
from ckpt.handlers._tree_file import encode_tree, load_tree
from ckpt.storage._manifests import read_manifest
from ckpt.storage._resolve import open_step_dir
from tests.support.real_jobs import Result, run_processes
from tests.support.stateful_objects import Averages, Counter, Recording, Reservoir
from tests.support.trees import structure


class Writer:
    """What a handler writes with in one of several processes."""

    def __init__(self, process: int, processes: int, files: dict[str, bytes]) -> None:
        self.process = process
        self.processes = processes
        self.files = files

    async def write_file(self, path: str, data: Any) -> None:
        own = own_path(path, self.process, self.processes)
        assert own not in self.files
        self.files[own] = bytes(data)

    async def in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


class Reader(Writer):
    """What a handler reads with."""

    item = "default"

    async def read_file(self, path: str) -> bytes:
        return self.files[path]

    async def read(self, entry: ItemEntry, reads: Sequence[Any]) -> list[Any]:
        assert not entry.leaves
        return [read.value for read in reads]


def saved(path: Path, items: Mapping[str, Sequence[Any]], handlers: Any = ()) -> Manifest:
    """Write a step that as many processes saved as there are objects for every item."""
    found = find_handlers(handlers)

    async def staged(name: str, objects: Sequence[Any], files: dict[str, bytes]) -> ItemEntry:
        entries = []
        for process, item in enumerate(objects):
            handler = found.for_item(name, item)
            assert is_per_process(handler)
            writer: Any = Writer(process, len(objects), files)
            entries.append(await (await handler.stage(item, writer)))
        return combine(entries)

    entries, listed = {}, {}
    for name, objects in items.items():
        files: dict[str, bytes] = {}
        entries[name] = asyncio.run(staged(name, objects, files))
        for file, data in files.items():
            listed[f"{name}/{file}"] = FileEntry(size=len(data), digest=digest(data))
            (path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (path / name / file).write_bytes(data)
    manifest = Manifest(
        format="ckpt",
        version=1,
        step=None,
        attempt="0" * 32,
        unnamed=False,
        items=entries,
        created_ns=0,
        committed_ns=0,
        writer={},
        process_count=len(objects),
        files=listed,
    )
    path.mkdir(exist_ok=True)
    (path / "ckpt.json").write_bytes(encode(manifest))
    return manifest


def restored(path: Path, items: Any, process: int, processes: int, handlers: Any = ()) -> Any:
    """Load items as one process of a job."""
    storage, step_dir = open_step_dir(path, follow=True)
    engine = make_engine(Staging(), handlers, ())

    async def load() -> dict[str, Any]:
        manifest = await read_manifest(storage, step_dir)
        wanted = wanted_items(manifest, RestoreOptions(items=items))
        restore = RestoreContext(storage, step_dir, manifest, engine, (), process, processes)
        return await restore_items(restore, wanted)

    return asyncio.run(load())


def kinds(number: int) -> dict[str, Any]:
    """One object of every kind."""
    random = np.random.default_rng(number)
    return {
        "json": Counter(number),
        "bytes": Reservoir(bytes([number])),
        "tree": Averages(float(number)),
        "files": Recording({"a.bin": bytes([number]), "b/c": b""}),
        "random": random,
    }


def state(item: Any) -> Any:
    if isinstance(item, np.random.Generator):
        return item.bit_generator.state
    return {name: np.asarray(value).tolist() for name, value in vars(item).items()}


def every(numbers: Sequence[int]) -> dict[str, list[Any]]:
    made = [kinds(number) for number in numbers]
    return {name: [each[name] for each in made] for name in made[0]}


@pytest.mark.parametrize("count", [2, 3, 12])
def test_every_process_gets_its_own_state_back(count: int, tmp_path: Path) -> None:
    saved(tmp_path / "x", every(range(1, count + 1)))
    for process in {0, 1, count - 1}:
        likes = kinds(99)
        found = restored(tmp_path / "x", likes, process, count)
        wanted = kinds(process + 1)
        for name in likes:
            assert found[name] is likes[name]
            assert state(found[name]) == state(wanted[name]), name
        raw = restored(tmp_path / "x", ["bytes", "json", "files", "tree"], process, count)
        assert raw["bytes"] == bytes([process + 1])
        assert raw["json"]["count"] == process + 1
        assert raw["files"] == {"a.bin": bytes([process + 1]), "b/c": b""}
        assert raw["tree"]["steps"] == (process + 1, 2)
    # Nothing of it is wrong.
    assert ckpt.sync.verify(tmp_path / "x").ok


@pytest.mark.parametrize(("count", "now"), [(2, 1), (2, 3), (3, 2)])
def test_equal_states_are_for_any_number_of_processes(count: int, now: int, tmp_path: Path) -> None:
    saved(tmp_path / "x", every([5] * count))
    for process in range(now):
        found = restored(tmp_path / "x", kinds(99), process, now)
        for name, item in kinds(5).items():
            assert state(found[name]) == state(item), name


@pytest.mark.parametrize("now", [1, 2, 4])
@pytest.mark.parametrize("name", ["json", "bytes", "tree", "files", "random"])
def test_different_states_are_not_dealt_out_anew(name: str, now: int, tmp_path: Path) -> None:
    saved(tmp_path / "x", {name: every([5, 5, 6])[name]})
    for like in ({name: kinds(99)[name]}, [name]):
        with pytest.raises(TargetMismatchError) as caught:
            restored(tmp_path / "x", like, 0, now)
        message = str(caught.value)
        assert "saved by 3 processes, each with a state of its own" in message
        assert "0 and 2 differ" in message
        assert f"restored by {now}" in message
        assert "Restore with 3 processes, or leave the item out (items=)" in message
        assert caught.value.item == name
        if isinstance(like, dict):
            assert state(like[name]) == state(kinds(99)[name])


@pytest.mark.parametrize("process", [0, 1, 2])
def test_what_one_process_saved_is_for_every_process(process: int, tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", items=kinds(5))
    found = restored(tmp_path / "x", kinds(99), process, 3)
    for name, item in kinds(5).items():
        assert state(found[name]) == state(item), name


class Shard:
    """A data iterator like Grain's: its one file says whose it is."""

    def __init__(self, process: int, processes: int, position: int = 0) -> None:
        self.file = f"process_{process}-of-{processes}.json"
        self.position = position

    async def save(self, directory: Any) -> Awaitable[None]:
        async def write() -> None:
            path = await directory.await_creation() / self.file
            path.write_text(str(self.position))

        return write()

    async def load(self, directory: Path) -> Awaitable[None]:
        async def read() -> None:
            self.position = int((directory / self.file).read_text())

        return read()


def test_files_that_say_whose_they_are_keep_their_names(tmp_path: Path) -> None:
    saved(tmp_path / "x", {"data": [Shard(0, 2, 10), Shard(1, 2, 11)]})
    # Where Grain's own handler looks for them.
    assert (tmp_path / "x" / "data" / "process_1-of-2.json").read_text() == "11"
    like = Shard(1, 2)
    restored(tmp_path / "x", {"data": like}, 1, 2)
    assert like.position == 11
    with pytest.raises(TargetMismatchError, match="saved by 2 processes"):
        restored(tmp_path / "x", {"data": Shard(0, 1)}, 0, 1)
    saved(tmp_path / "y", {"data": [Shard(0, 2, 10), Shard(1, 2, 10)]})
    ckpt.sync.save(tmp_path / "z", items={"data": Shard(0, 1, 10)})
    for name in ("y", "z"):
        like = Shard(2, 3)
        restored(tmp_path / name, {"data": like}, 2, 3)
        assert like.position == 10


class NoteHandler:
    """A handler of somebody else, who only says that every process has its own."""

    name = "example.note"
    per_process = True

    def accepts(self, item: Any) -> bool:
        return isinstance(item, str)

    async def stage(self, item: str, writer: Any) -> Awaitable[ItemEntry]:
        async def commit() -> ItemEntry:
            await writer.write_file("notes/first.txt", item.encode())
            return ItemEntry(handler=self.name, nbytes=len(item), data={"length": len(item)})

        return Deferred(commit)

    async def load(self, entry: ItemEntry, like: Any, adapt: Any, reader: Any) -> Any:
        found = (await reader.read_file("notes/first.txt")).decode()
        assert entry.data == {"length": len(found)}
        assert entry.nbytes == len(found)
        return f"{found} in {reader.process} of {reader.processes}"


def test_a_handler_needs_nothing_but_to_say_so(tmp_path: Path) -> None:
    handlers = [NoteHandler()]
    saved(tmp_path / "x", {"note": ["zero", "first"]}, handlers)
    found = restored(tmp_path / "x", ["note"], 1, 2, handlers)
    assert found == {"note": "first in 1 of 2"}
    with pytest.raises(TargetMismatchError):
        restored(tmp_path / "x", ["note"], 0, 1, handlers)


def test_a_process_may_keep_its_own_on_a_disk_of_its_own(tmp_path: Path) -> None:
    both = saved(tmp_path / "x", every([1, 2]))
    own = {}
    for name, entry in both.items.items():
        data: Any = entry.data
        first = replace(entry, data=data["processes"][1])
        assert apart(first, 0, 1) is first
        own[name] = apart(first, 1, 2)
    files = {path: each for path, each in both.files.items() if "process_0" not in path}
    for path in set(both.files) - set(files):
        (tmp_path / "x" / path).unlink()
    manifest = replace(both, items=own, files=files)
    (tmp_path / "x" / "ckpt.json").write_bytes(encode(manifest))
    found = restored(tmp_path / "x", kinds(99), 1, 2)
    for name, item in kinds(2).items():
        assert state(found[name]) == state(item), name
    for process, processes in ((0, 2), (0, 1), (1, 3)):
        for name in own:
            with pytest.raises((TargetMismatchError, CorruptCheckpointError)):
                restored(tmp_path / "x", [name], process, processes)


class LengthHandler(NoteHandler):
    """Keeps what it stores in the manifest alone."""

    name = "example.length"

    async def stage(self, item: str, writer: Any) -> Awaitable[ItemEntry]:
        async def commit() -> ItemEntry:
            return ItemEntry(handler=self.name, data=len(item))

        return Deferred(commit)

    async def load(self, entry: ItemEntry, like: Any, adapt: Any, reader: Any) -> Any:
        return entry.data


def test_a_state_may_stand_in_the_manifest(tmp_path: Path) -> None:
    handlers = [LengthHandler()]
    saved(tmp_path / "x", {"a": ["1", "22"], "b": ["1", "2"]}, handlers)
    assert restored(tmp_path / "x", None, 1, 2, handlers) == {"a": 2, "b": 1}
    assert restored(tmp_path / "x", ["b"], 2, 3, handlers) == {"b": 1}
    with pytest.raises(TargetMismatchError):
        restored(tmp_path / "x", ["a"], 2, 3, handlers)


def test_a_part_without_its_file_is_damage(tmp_path: Path) -> None:
    saved(tmp_path / "x", {"json": [Counter(1), Counter(2)]})
    (tmp_path / "x" / "json" / "process_1-of-2.json").unlink()
    assert restored(tmp_path / "x", ["json"], 0, 2)["json"]["count"] == 1
    with pytest.raises(CorruptCheckpointError, match=r"process_1-of-2\.json"):
        restored(tmp_path / "x", ["json"], 1, 2)


def test_entries_that_do_not_belong_together_are_refused() -> None:
    one = ItemEntry(handler="stateful", data={"form": "json"})
    assert combine([one]) is one
    other = ItemEntry(handler="bytes")
    with pytest.raises(
        InvalidArgumentError, match="process 0 saved it with the handler 'stateful'"
    ):
        combine([one, one, other])
    leaves = ItemEntry(
        handler="mine", leaves=LeafTable.of([LeafEntry(name="a", kind="int", value="1")])
    )
    with pytest.raises(InvalidArgumentError, match="keeps what it stores in files"):
        combine([leaves, leaves])


@pytest.mark.parametrize("parts", [None, [], [{}], [{}, {}, {}], {"a": 1}, "ab"], ids=str)
def test_a_combined_entry_that_cannot_be_true_is_damage(parts: Any, tmp_path: Path) -> None:
    manifest = saved(tmp_path / "x", {"json": [Counter(1), Counter(2)]})
    entry = manifest.items["json"]
    data: Any = {"process_count": 2, "processes": parts}
    broken = replace(manifest, items={"json": replace(entry, data=data)})
    with pytest.raises(CorruptCheckpointError, match="part for every process"):
        pick(broken, "json", 0, 2)


NAMES = st.lists(st.sampled_from(["a", "process_0-of-1.json", "process_x", "b.process_1-of-2"]))
PATHS = NAMES.filter(bool).map("/".join)
WHO = st.integers(1, 30).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n)))


@given(PATHS, PATHS, WHO, WHO)
def test_paths_of_different_processes_never_meet(
    path: str, other: str, who: tuple[int, int], them: tuple[int, int]
) -> None:
    mine = own_path(path, *who)
    assert own_path(path, 0, 1) == path
    assert own_path(mine, *who) == mine
    if who[1] == them[1] > 1 and who != them:
        assert mine != own_path(other, *them)
    if who[1] > 1:
        assert renamed(mine, 0, 1).endswith(path)


def tree() -> dict[str, Any]:
    shared = jnp.arange(3.0)
    return {
        "b": [np.arange(6, dtype=np.int16).reshape(2, 3), jnp.ones((2, 2), jnp.bfloat16)],
        "empty": np.zeros((0, 3)),
        "key": jax.random.key(3),
        "shared": (shared, shared),
        "text": "ü",
        "weak": jnp.asarray(2.0),
        "where": jax.device_put(jnp.arange(4), jax.devices()[0]),
        "zero": np.float32(1.5),
    }


def loaded(data: bytes, like: Any = None, adapt: Adapt | None = None) -> Any:
    reader: Any = Reader(0, 1, {})
    return asyncio.run(load_tree(data, like, adapt or Adapt(), reader))


class Trees:
    """An object whose state is any tree."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


def test_the_tree_of_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    saved(tmp_path / "x", {"a": [Trees({"other": np.zeros(2)}), Trees(tree())]})
    found = restored(tmp_path / "x", {"a": Trees()}, 1, 2)["a"].state
    wanted = tree()
    assert structure(found) == structure(wanted)
    assert found["shared"][0] is found["shared"][1]
    assert found["key"].dtype == wanted["key"].dtype
    assert found["weak"].weak_type
    assert found["where"].committed
    assert type(found["zero"]) is np.float32
    for name in ("b", "empty", "shared", "weak", "where", "zero"):
        pairs = zip(jax.tree.leaves(found[name]), jax.tree.leaves(wanted[name]), strict=True)
        for one, other in pairs:
            assert (type(one), one.dtype) == (type(other), other.dtype)
            np.testing.assert_array_equal(one, other)
    # As a tree it can be loaded onto a target, as any other.
    target = {"b": [jax.ShapeDtypeStruct((3, 3), jnp.float32), ...]}
    adapt = Adapt(cast={"b.0": "float32"}, resize="pad", extra="ignore")
    storage_like = restored_with(tmp_path / "x", target, adapt)
    np.testing.assert_array_equal(storage_like["b"][0], [[0, 1, 2], [3, 4, 5], [0, 0, 0]])
    sharded = jax.sharding.NamedSharding(
        jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",)), jax.sharding.PartitionSpec("x")
    )
    like = {"b": [jax.ShapeDtypeStruct((2, 3), jnp.int16, sharding=sharded), ...]}
    split = restored_with(tmp_path / "x", like, Adapt(extra="ignore"))["b"][0]
    assert split.sharding == sharded
    np.testing.assert_array_equal(split, wanted["b"][0])


def restored_with(path: Path, like: Any, adapt: Adapt) -> Any:
    storage, step_dir = open_step_dir(path, follow=True)
    engine = make_engine(Staging(), (), ())

    async def load() -> dict[str, Any]:
        manifest = await read_manifest(storage, step_dir)
        wanted = wanted_items(manifest, RestoreOptions(items={"a": like}, adapt={"a": adapt}))
        return await restore_items(
            RestoreContext(storage, step_dir, manifest, engine, (), 1, 2), wanted
        )

    return asyncio.run(load())["a"]


def test_what_a_state_cannot_hold_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="functions"):
        encode_tree({"f": np.sin})
    with pytest.raises(UnsupportedLeafError):
        encode_tree({"x": object()})


WHOLE = encode_tree(tree())


@given(st.data())
def test_a_damaged_tree_is_an_error_of_the_library(data: st.DataObject) -> None:
    """Digests find it first; who has them right finds this."""
    place = data.draw(st.integers(0, min(len(WHOLE), 3000) - 1))
    cut = data.draw(st.booleans())
    byte = data.draw(st.integers(0, 255))
    broken = WHOLE[:place] if cut else WHOLE[:place] + bytes([byte]) + WHOLE[place + 1 :]
    try:
        loaded(broken)
    except CheckpointError:
        return
    assert not cut


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Result]]:
    """A root, and what the two processes that saved its step found."""
    root = tmp_path_factory.mktemp("job") / "run"
    return root, run_processes(2, "save_per_process.py", root, "save")


def test_every_process_of_a_job_goes_on_where_it_was(job: tuple[Path, list[Result]]) -> None:
    root, results = job
    first, second = (result.value["expected"] for result in results)
    assert all(one != other for one, other in zip(first, second, strict=True))
    for result in results:
        assert result.value["found"] == result.value["expected"]
        assert result.value["model"] is True
        assert result.value["progress"] == 7
        # What is no state of a process is the primary's.
        assert result.value["notes"] == "of process 0"
    for process in range(2):
        # Where Grain's own handler looks for it.
        assert (root / "1" / "data" / f"process_{process}-of-2.json").exists()
    assert ckpt.sync.verify(root / "1").ok


def test_another_job_gets_what_can_be_given_to_it(job: tuple[Path, list[Result]]) -> None:
    root = job[0]
    for result in run_processes(3, "save_per_process.py", root, "restore"):
        found = result.value
        for name in ("data", "random", "averages"):
            message = found.pop(name)
            assert f"step 1, item '{name}'" in message
            assert "it was saved by 2 processes, each with a state of its own" in message
            assert "restored by 3: a state cannot be divided again" in message
        assert found == {"progress": 7, "model": True, "notes": "of process 0"}
    # This process is a job of one.
    with pytest.raises(TargetMismatchError, match="saved by 2 processes"):
        ckpt.sync.load(root / "1")
    rest = ckpt.sync.load(root / "1", items=["model", "progress", "notes"])
    np.testing.assert_array_equal(rest["model"]["w"], np.arange(96.0).reshape(24, 4))
    assert rest["progress"] == {"seen": 7}


def test_every_process_of_a_job_may_keep_its_own_on_its_own_disk(tmp_path: Path) -> None:
    for result in run_processes(2, "save_per_process.py", tmp_path, "save_apart"):
        assert result.value["found"] == result.value["expected"]
        assert result.value["model"] is True
        assert result.value["notes"] == f"of process {result.index}"
        # Nobody else can take it for theirs.
        with pytest.raises(TargetMismatchError, match="saved by 2 processes"):
            ckpt.sync.load(tmp_path / str(result.index) / "1", items=["data"])
