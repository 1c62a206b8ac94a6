"""Objects that know their own state: exact resume, three protocols, two phases."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace

import ckpt
from ckpt import errors
from ckpt._format.manifest import decode, encode
from ckpt.handlers._stateful import StatefulHandler
from tests.support.stateful_objects import Averages, Counter, Recording, Reservoir


def dataset(workers: int = 0) -> Any:
    made = grain.MapDataset.range(200).shuffle(seed=7).map(lambda number: number * 2).repeat()
    return made.batch(4).to_iter_dataset(grain.ReadOptions(num_threads=workers))


def take(iterator: Any, count: int) -> list[Any]:
    return [np.asarray(next(iterator)).tolist() for _ in range(count)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_grain_iterator_goes_on_exactly_beside_the_train_state(
    workers: int, tmp_path: Path
) -> None:
    state = {"w": jnp.arange(8.0)}
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        data = iter(dataset(workers))
        take(data, 7)
        commit = mgr.save(7, items={"model": state, "data": data})
        expected = take(data, 60)
        commit.result()
        again = iter(dataset(workers))
        found = mgr.restore(items={"model": state, "data": again})
    assert found["data"] is again
    assert take(again, 60) == expected
    np.testing.assert_array_equal(found["model"]["w"], state["w"])


def test_a_grain_loader_goes_on_exactly(tmp_path: Path) -> None:
    loader = grain.DataLoader(
        data_source=grain.sources.RangeDataSource(0, 50, 1),
        sampler=grain.samplers.IndexSampler(50, shuffle=True, seed=1, num_epochs=None),
        worker_count=0,
    )
    data = iter(loader)
    take(data, 11)
    ckpt.sync.save(tmp_path / "x", data)
    expected = take(data, 60)
    again = iter(loader)
    ckpt.sync.load(tmp_path / "x", again)
    assert take(again, 60) == expected


def test_the_state_of_an_iterator_is_its_own_json_file(tmp_path: Path) -> None:
    data = iter(dataset())
    take(data, 3)
    ckpt.sync.save(tmp_path / "x", items={"data": data})
    file = tmp_path / "x" / "data" / "process_0-of-1.json"
    assert json.loads(file.read_bytes()) == data.get_state()
    # Without an object the state itself comes back.
    assert ckpt.sync.load(tmp_path / "x")["data"] == data.get_state()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_two_phases_run_for_programs_of_either_kind(backend: str, tmp_path: Path) -> None:
    import anyio

    async def main() -> None:
        data = iter(dataset())
        take(data, 5)
        await ckpt.save(tmp_path / "x", data)
        again = await ckpt.load(tmp_path / "x", iter(dataset()))
        assert take(again, 9) == take(data, 9)

    anyio.run(main, backend=backend)


def test_every_protocol_is_written_and_set(tmp_path: Path) -> None:
    items: dict[str, Any] = {
        "json": Counter(3),
        "bytes": Reservoir(b"\0\xff"),
        "tree": Averages(2.0),
        "files": Recording({"a.bin": b"1", "b/c": b""}),
    }
    ckpt.sync.save(tmp_path / "x", items=items)
    assert (tmp_path / "x" / "json" / "process_0-of-1.json").exists()
    assert (tmp_path / "x" / "bytes" / "process_0-of-1.bin").read_bytes() == b"\0\xff"
    assert (tmp_path / "x" / "files" / "b" / "c").read_bytes() == b""
    likes = {"json": Counter(), "bytes": Reservoir(), "tree": Averages(), "files": Recording()}
    found = ckpt.sync.load(tmp_path / "x", items=likes)
    assert all(found[name] is likes[name] for name in likes)
    assert found["json"].count == 3
    assert found["bytes"].data == b"\0\xff"
    np.testing.assert_array_equal(found["tree"].means, np.full((3, 2), 2.0))
    assert found["tree"].steps == (2, 2)
    assert found["files"].notes == items["files"].notes
    raw = ckpt.sync.load(tmp_path / "x")
    assert raw["json"] == {"count": 3, "seen": ["a", None]}
    assert raw["bytes"] == b"\0\xff"
    assert raw["tree"]["steps"] == (2, 2)
    assert raw["files"] == items["files"].notes


def test_the_tree_of_a_state_can_be_loaded_onto_a_target(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", Averages(2.0))
    target = {"means": jax.ShapeDtypeStruct((3, 2), jnp.float32), "steps": (int, int)}
    found: Any = ckpt.sync.load(tmp_path / "x", target, adapt=ckpt.Adapt(cast="float32"))
    assert found["means"].dtype == jnp.float32


def test_an_object_with_another_protocol_is_a_mismatch(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", Counter(3))
    for like in (Averages(), Recording(), object(), Counter, {"count": 1}):
        with pytest.raises(errors.TargetMismatchError, match="get_state and set_state"):
            ckpt.sync.load(tmp_path / "x", like)


def test_a_tree_of_jax_stays_a_tree_whatever_it_can_do(tmp_path: Path) -> None:
    @jax.tree_util.register_pytree_node_class
    class Both(Counter):
        def tree_flatten(self) -> Any:
            return (self.count,), None

        @classmethod
        def tree_unflatten(cls, _: Any, children: Any) -> Any:
            return cls(*children)

    assert not StatefulHandler().accepts(Both(1))
    assert StatefulHandler().accepts(Counter(1))


class Magic:
    """Has every attribute one asks for, and no state."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class Saver:
    """Coroutines of those names that mean something else."""

    async def save(self, directory: str, step: int) -> None: ...

    async def load(self, directory: str, step: int) -> None: ...


@pytest.mark.parametrize("item", [Magic(), Saver(), Counter])
def test_objects_without_the_protocol_are_refused(item: Any, tmp_path: Path) -> None:
    assert not StatefulHandler().accepts(item)
    with pytest.raises(errors.CheckpointError):
        ckpt.sync.save(tmp_path / "x", items={"thing": item})
    with pytest.raises(errors.InvalidArgumentError, match="get_state and set_state"):
        ckpt.sync.save(tmp_path / "x", items={"a": item}, handlers={"a": StatefulHandler()})
    assert list(tmp_path.iterdir()) == []


def rewritten(path: Path, **data: Any) -> None:
    manifest = decode((path / "ckpt.json").read_bytes(), where="")
    entry = manifest.items["default"]
    assert isinstance(entry.data, dict)
    entry = replace(entry, data={**entry.data, **data})
    manifest = replace(manifest, items={"default": entry})
    (path / "ckpt.json").write_bytes(encode(manifest))


@pytest.mark.parametrize("data", [{"process_count": 4}, {"files": ["process_0-of-4.json"]}])
def test_the_state_of_another_number_of_processes_is_a_mismatch(
    data: dict[str, Any], tmp_path: Path
) -> None:
    ckpt.sync.save(tmp_path / "x", Recording({"process_0-of-1.json": b"{}"}))
    rewritten(tmp_path / "x", **data)
    target = Recording({"a": b"kept"})
    with pytest.raises(errors.TargetMismatchError, match="4 processes, and this run has 1"):
        ckpt.sync.load(tmp_path / "x", target)
    assert target.notes == {"a": b"kept"}


@pytest.mark.parametrize(
    "data",
    [
        {"protocol": "pickle"},
        {"protocol": None},
        {"process_count": "1"},
        {"files": "a"},
        {"files": ["../ckpt.json"]},
        {"files": ["/etc/passwd"]},
        {"files": ["nothing"]},
        {"files": [1]},
    ],
    ids=str,
)
def test_an_entry_that_cannot_be_true_is_damage(data: dict[str, Any], tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", Recording({"a": b"1"}))
    rewritten(tmp_path / "x", **data)
    for like in (Recording(), None):
        with pytest.raises(errors.CorruptCheckpointError):
            ckpt.sync.load(tmp_path / "x", like)


class Linking(Recording):
    """Writes what is no plain file, or a name that cannot be kept."""

    def __init__(self, name: str, *, link: bool) -> None:
        super().__init__()
        self.name = name
        self.link = link

    async def save(self, directory: Any) -> Awaitable[None]:
        async def write() -> None:
            path = await directory.await_creation() / self.name
            path.symlink_to("/etc/passwd") if self.link else path.write_bytes(b"x")

        return write()


@pytest.mark.parametrize(
    ("name", "link"), [("a", True), ("_METADATA", False), ("d", True), ("a\nb", False)]
)
def test_files_that_cannot_be_kept_are_refused(name: str, link: bool, tmp_path: Path) -> None:
    with pytest.raises(errors.HandlerError, match="its object wrote") as caught:
        ckpt.sync.save(tmp_path / "x", Linking(name, link=link))
    assert caught.value.item == "default"
    assert list(tmp_path.iterdir()) == []


class Failing(Counter):
    """Raises where it is told to, after having done half of it."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def get_state(self) -> dict[str, Any]:
        if self.where == "get":
            raise OSError("worker died")
        return super().get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        raise KeyError("no such key")


def test_an_error_of_the_object_names_item_and_handler(tmp_path: Path) -> None:
    with pytest.raises(errors.HandlerError, match=r"'stateful' could not save it: OSError") as got:
        ckpt.sync.save(tmp_path / "x", items={"data": Failing("get")})
    assert got.value.item == "data"
    assert isinstance(got.value.__cause__, OSError)
    assert list(tmp_path.iterdir()) == []
    ckpt.sync.save(tmp_path / "x", items={"data": Failing("set")})
    with pytest.raises(errors.HandlerError, match=r"'stateful' could not load it: KeyError") as got:
        ckpt.sync.load(tmp_path / "x", items={"data": Failing("set")})
    assert isinstance(got.value.__cause__, KeyError)


def test_nothing_temporary_is_left_when_a_save_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second phase never runs, without a warning, and its directory is gone."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    items = {"data": Recording({"a": b"1"}), "bad": {"x": object()}}
    with pytest.raises(errors.UnsupportedLeafError):
        ckpt.sync.save(tmp_path / "x", items=items)
    assert os.listdir(tmp_path) == ["tmp"]
    assert os.listdir(tmp_path / "tmp") == []


class Statistics:
    """Its state is a tree of arrays."""

    def __init__(self, mean: float) -> None:
        self.state: Any = {"mean": np.array([mean]), "count": np.float32(mean)}

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


def test_formats_are_not_for_the_state_of_an_object(tmp_path: Path) -> None:
    narrow = ckpt.ArrayFormat(dtype="bfloat16")
    items = {"data": Statistics(1.0000001), "model": {"w": np.ones(3, np.float32)}}
    ckpt.sync.save(
        tmp_path / "x", items=items, formats=lambda _, leaf: narrow if leaf.dtype != int else None
    )
    other = Statistics(0.0)
    found = ckpt.sync.load(tmp_path / "x", items={"data": other, "model": None})
    assert other.state["mean"].dtype == np.float64
    assert other.state["mean"][0] == 1.0000001
    assert other.state["count"] == np.float32(1.0000001)
    assert found["model"]["w"].dtype == "bfloat16"
