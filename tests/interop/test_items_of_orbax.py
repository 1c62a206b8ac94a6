"""Items of Orbax that are no trees: iterators, messages, keys. Each goes on where it was."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp0
import pytest
from google.protobuf import field_mask_pb2, struct_pb2
from grain._src.core import sharding
from orbax.checkpoint import v1 as ocp

import ckpt
from ckpt import errors
from ckpt.sync import CheckpointManager
from tests.support.simulated_job import closed, managers, together
from tests.support.stateful_objects import Counter, Recording, Reservoir

STEP, SEEN = 3, 7
STATE = {"w": np.arange(6.0)}
Items = dict[str, Any]


def dataset(seen: int = 0) -> Any:
    return advanced(iter(grain.MapDataset.range(100).shuffle(seed=1).to_iter_dataset()), seen)


def loader(seen: int = 0) -> Any:
    """The state of this one is bytes."""
    sampler = grain.samplers.IndexSampler(100, grain.sharding.NoSharding(), shuffle=True, seed=2)
    return advanced(iter(grain.DataLoader(data_source=range(100), sampler=sampler)), seen)


def advanced(made: Any, seen: int) -> Any:
    for _ in range(seen):
        next(made)
    return made


def following(iterator: Any) -> list[int]:
    return [int(next(iterator)) for _ in range(20)]


class OnlyState:
    """An iterator that has no `load`, such as one of another library or of a program."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator

    def __next__(self) -> Any:
        return next(self.iterator)

    def get_state(self) -> Any:
        return self.iterator.get_state()

    def set_state(self, state: Any) -> None:
        self.iterator.set_state(state)


def by_manager(root: Path, items: Items) -> Path:
    savers = {
        name: ocp0.args.StandardSave if name == "state" else grain.checkpoint.CheckpointSave
        for name in items
    }
    with ocp0.CheckpointManager(root) as manager:
        args = {name: savers[name](item) for name, item in items.items()}
        manager.save(STEP, args=ocp0.args.Composite(**args))
        manager.wait_until_finished()
    return root / str(STEP)


def by_v1(root: Path, items: Items) -> Path:
    root.mkdir()
    ocp.save_checkpointables(root / str(STEP), items)
    return root / str(STEP)


def by_v1_checkpointer(root: Path, items: Items) -> Path:
    with ocp.training.Checkpointer(root) as checkpointer:
        checkpointer.save_checkpointables(STEP, items)
    return root / str(STEP)


def as_years_ago(root: Path, items: Items) -> Path:
    """Without the file that names handlers."""
    path = by_manager(root, items)
    (path / "_CHECKPOINT_METADATA").unlink()
    return path


WRITERS = [by_manager, by_v1, by_v1_checkpointer, as_years_ago]
Make = Callable[..., Any]
Write = Callable[[Path, Items], Path]


@pytest.fixture(params=WRITERS)
def write(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("make", [dataset, loader])
def test_an_iterator_of_grain_goes_on(tmp_path: Path, write: Write, make: Make) -> None:
    path = write(tmp_path / "run", {"state": STATE, "data": make(SEEN)})
    expected = following(make(SEEN))
    with CheckpointManager(tmp_path / "run") as mgr:
        start, found = mgr.resume(items={"state": STATE, "data": make()})
        assert start == STEP + 1
        assert following(found["data"]) == expected
        assert np.array_equal(found["state"]["w"], STATE["w"])
        data = make()
        assert mgr.restore(like={"state": STATE, "data": data})["data"] is data
        assert following(data) == expected
    for given in (make(), OnlyState(make())):
        ckpt.sync.load(path, items={"data": given})
        assert following(given) == expected
    # Without a target it is what Grain wrote.
    assert isinstance(ckpt.sync.load(path)["data"], dict)


def test_a_checkpoint_that_is_an_iterator(tmp_path: Path) -> None:
    ocp0.Checkpointer(grain.checkpoint.CheckpointHandler()).save(tmp_path / "x", dataset(SEEN))
    assert following(ckpt.sync.load(tmp_path / "x", like=dataset())) == following(dataset(SEEN))


def test_an_object_of_a_program_gets_its_files_back(tmp_path: Path) -> None:
    notes = {"a.bin": b"\0\1", "deep/b": b""}
    path = by_v1(tmp_path / "run", {"state": STATE, "notes": Recording(notes)})
    found = Recording()
    ckpt.sync.load(path, items={"notes": found})
    assert found.notes == notes
    assert ckpt.sync.load(path, items=["notes"]) == {"notes": notes}


def test_a_state_goes_to_whatever_takes_it_as_it_is(tmp_path: Path) -> None:
    state = {"count": 5}
    path = by_v1(tmp_path / "run", {"state": STATE, "data": Recording({"x.json": b'{"count": 5}'})})
    counter, reservoir = Counter(), Reservoir()
    ckpt.sync.load(path, items={"data": counter})
    ckpt.sync.load(path, items={"data": reservoir})
    assert (counter.count, reservoir.data) == (5, b'{"count": 5}')
    assert ckpt.sync.load(path, items=["data"]) == {"data": state}


class Refusing(OnlyState):
    def set_state(self, state: Any) -> None:
        raise ValueError("of another dataset")


@pytest.mark.parametrize("given", [iter([1]), Refusing(dataset())])
def test_an_iterator_that_does_not_take_its_state_does_not_begin_again(
    tmp_path: Path, given: Any
) -> None:
    by_manager(tmp_path / "run", {"state": STATE, "data": dataset(SEEN)})
    with (
        CheckpointManager(tmp_path / "run") as mgr,
        pytest.raises(errors.CheckpointError) as caught,
    ):
        mgr.resume(items={"state": STATE, "data": given})
    assert (caught.value.step, caught.value.item) == (STEP, "data")


# -- jobs -----------------------------------------------------------------------------------------


def of_a_job(root: Path, monkeypatch: pytest.MonkeyPatch, *iterators: Any) -> Path:
    """A step that as many processes saved as there are iterators."""
    path = by_manager(root, {"state": STATE, "data": iterators[0]})
    shutil.rmtree(path / "data")
    (path / "data").mkdir()
    for process, iterator in enumerate(iterators):
        place = (process, len(iterators))
        monkeypatch.setattr(sharding, "get_process_index_and_count", lambda place=place: place)
        grain.checkpoint.CheckpointHandler().save(path / "data", iterator)
    monkeypatch.undo()
    return path


def test_each_process_gets_its_own_iterator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_a_job(tmp_path / "run", monkeypatch, dataset(SEEN), dataset(SEEN + 1))
    mgrs = managers(tmp_path / "run", 2)
    data = [OnlyState(dataset()), OnlyState(dataset())]
    together(
        *(
            lambda mgr=mgr, each=each: mgr.restore(items={"state": STATE, "data": each})
            for mgr, each in zip(mgrs, data, strict=True)
        )
    )
    closed(mgrs)
    assert [following(each) for each in data] == [
        following(dataset(SEEN)),
        following(dataset(SEEN + 1)),
    ]


def test_another_number_of_processes_is_an_error_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = of_a_job(tmp_path / "run", monkeypatch, *map(dataset, (1, 2, 3)))
    data = dataset()
    with pytest.raises(errors.TargetMismatchError, match=r"saved by 3 processes.*by 1") as caught:
        ckpt.sync.load(path, items={"state": STATE, "data": data})
    assert caught.value.item == "data"
    assert following(data) == following(dataset())
    assert set(ckpt.sync.load(path, items=["state"])) == {"state"}


def elastic(shard: int, count: int, seen: int = 0) -> Any:
    made = grain.experimental.ElasticIterator(
        grain.MapDataset.range(1000).shuffle(seed=1), 4, grain.sharding.ShardOptions(shard, count)
    )
    return advanced(iter(made), seen)


def test_an_elastic_iterator_goes_on_in_another_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = of_a_job(tmp_path / "run", monkeypatch, elastic(0, 2, SEEN), elastic(1, 2, SEEN))
    found = elastic(0, 1)
    ckpt.sync.load(path, items={"data": found})
    assert next(found).tolist() == next(elastic(0, 1, SEEN)).tolist()


def test_a_state_that_is_missing_is_named_and_the_rest_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = of_a_job(tmp_path / "run", monkeypatch, dataset(1), dataset(2))
    (path / "data" / "process_1-of-2.json").unlink()
    with pytest.raises(errors.CorruptCheckpointError, match="1 of 2 processes") as caught:
        ckpt.sync.load(path)
    assert caught.value.item == "data"
    assert "1 of 2 processes" in str(ckpt.sync.metadata(path))
    assert set(ckpt.sync.load(path, items=["state"])) == {"state"}


def test_states_of_several_jobs_are_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = of_a_job(tmp_path / "run", monkeypatch, dataset(1), dataset(2))
    shutil.copy(path / "data" / "process_1-of-2.json", path / "data" / "process_0-of-1.json")
    caplog.set_level(logging.WARNING, logger="ckpt")
    assert set(ckpt.sync.load(path)) == {"state"}
    (said,) = [each.getMessage() for each in caplog.records if each.name == "ckpt"]
    assert "'data'" in said
    assert "of 1 and of 2 processes" in said
    with pytest.raises(errors.UnsupportedFormatError, match="of 1 and of 2 processes"):
        ckpt.sync.load(path, items={"data": dataset()})


# -- messages, keys, names of files ----------------------------------------------------------------


def message(number: float = 3.0) -> Any:
    return struct_pb2.Struct(fields={"x": struct_pb2.Value(number_value=number)})


def test_a_message_comes_back(tmp_path: Path) -> None:
    with ocp0.CheckpointManager(tmp_path / "run") as manager:
        args = {"state": ocp0.args.StandardSave(STATE), "words": ocp0.args.ProtoSave(message())}
        manager.save(STEP, args=ocp0.args.Composite(**args))
        manager.wait_until_finished()
    ocp.save_checkpointables(tmp_path / "new", {"state": STATE, "words": message()})
    ocp0.Checkpointer(ocp0.ProtoCheckpointHandler("x.txt")).save(tmp_path / "alone", message())
    for path in (tmp_path / "run" / str(STEP), tmp_path / "new"):
        for like in (struct_pb2.Struct, message(0.0)):
            assert ckpt.sync.load(path, items={"words": like}) == {"words": message()}
        assert "number_value: 3" in ckpt.sync.load(path)["words"]
        with pytest.raises(errors.TargetMismatchError):
            ckpt.sync.load(path, items={"words": {"x": 3}})
        with pytest.raises(errors.TargetMismatchError, match="FieldMask"):
            ckpt.sync.load(path, items={"words": field_mask_pb2.FieldMask})
    assert ckpt.sync.load(tmp_path / "alone", struct_pb2.Struct) == message()


def test_random_keys_come_back(tmp_path: Path) -> None:
    old, new = np.random.get_state(), np.random.get_state(legacy=False)
    key, raw = jax.random.key(3), jax.random.PRNGKey(4)
    with ocp0.CheckpointManager(tmp_path / "run") as manager:
        args = {
            "old": ocp0.args.NumpyRandomKeySave(old),
            "new": ocp0.args.NumpyRandomKeySave(new),
            "key": ocp0.args.JaxRandomKeySave(key),
            "raw": ocp0.args.JaxRandomKeySave(raw),
        }
        manager.save(STEP, args=ocp0.args.Composite(**args))
        manager.wait_until_finished()
    found = ckpt.sync.load(tmp_path / "run" / str(STEP))
    expected = np.random.random(5)
    for name in ("old", "new"):
        np.random.set_state(found[name])
        assert np.array_equal(np.random.random(5), expected)
    again = ckpt.sync.load(tmp_path / "run" / str(STEP), items={"old": np.random.get_state()})
    np.random.set_state(again["old"])
    assert np.array_equal(np.random.random(5), expected)
    assert jnp.array_equal(jax.random.key_data(found["key"]), jax.random.key_data(key))
    assert jnp.array_equal(found["raw"], raw)


@pytest.mark.parametrize("name", [None, "rng"])
def test_checkpoints_that_are_a_key_or_json(tmp_path: Path, name: str | None) -> None:
    key = jax.random.key(3)
    handler = ocp0.JaxRandomKeyCheckpointHandler(name)
    ocp0.Checkpointer(handler).save(tmp_path / "key", args=ocp0.args.JaxRandomKeySave(key))
    found = ckpt.sync.load(tmp_path / "key")
    assert jnp.array_equal(jax.random.key_data(found), jax.random.key_data(key))
    json = ocp0.JsonCheckpointHandler(name)
    ocp0.Checkpointer(json).save(tmp_path / "json", {"lr": 0.1})
    assert ckpt.sync.load(tmp_path / "json", like={"lr": 0.0}) == {"lr": 0.1}


def test_folders_of_a_program_do_not_change_what_a_step_is(tmp_path: Path) -> None:
    path = by_manager(tmp_path / "run", {"state": STATE})
    with ocp0.CheckpointManager(tmp_path / "one") as manager:
        manager.save(STEP, args=ocp0.args.StandardSave(STATE))
        manager.wait_until_finished()
    one = tmp_path / "one" / str(STEP)
    for each in (path, one):
        (each / "assets").mkdir()
        (each / "assets" / "words.txt").write_text("a b c")
    assert set(ckpt.sync.load(path)) == {"state"}
    assert set(ckpt.sync.load(one)) == {"w"}
    (one / "_CHECKPOINT_METADATA").unlink()
    assert set(ckpt.sync.load(one)) == {"w"}


# -- written anew ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rewrite", [ckpt.sync.convert, ckpt.sync.adopt])
def test_what_is_written_anew_has_every_item(
    tmp_path: Path, rewrite: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = of_a_job(tmp_path / "run", monkeypatch, elastic(0, 2, SEEN), elastic(1, 2, SEEN))
    rewrite(path, tmp_path / "ours")
    found = elastic(0, 1)
    ckpt.sync.load(tmp_path / "ours", items={"data": found})
    assert next(found).tolist() == next(elastic(0, 1, SEEN)).tolist()
    assert ckpt.sync.verify(tmp_path / "ours").ok
