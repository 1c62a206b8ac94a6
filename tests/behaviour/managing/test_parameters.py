"""Every parameter of the calls has the effect that its description promises."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import ckpt
import ckpt.sync
from ckpt.errors import CorruptCheckpointError, InvalidArgumentError, StepExistsError
from tests.support.gated_item import Gate, GateHandler
from tests.support.snapshots import shared_memory

W = np.arange(1 << 17, dtype=np.float32).reshape(256, 512)


def state(step: int) -> dict[str, Any]:
    return {"params": {"w": W + step}, "n": step}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run of three steps, with metrics."""
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        for step in (1, 2, 3):
            mgr.save(step, state(step), metrics={"loss": step * 1.0, "seen": -step})
    return tmp_path / "run"


@pytest.fixture
def mgr(root: Path) -> Iterator[ckpt.sync.CheckpointManager]:
    with ckpt.sync.CheckpointManager(root) as made:
        yield made


def test_of_a_save_by_itself(tmp_path: Path) -> None:
    events: list[ckpt.types.Event] = []
    path = tmp_path / "x"
    info = ckpt.sync.save(
        path,
        items={"model": {"w": W}, "note": "x"},
        metrics={"loss": 0.5},
        custom_metadata={"seen": 1},
        extensions=[ckpt.extensions.VitalSigns()],
        observers=[events.append],
        formats={"w": ckpt.ArrayFormat(compression=ckpt.Zstd(1))},
        timeouts=ckpt.Timeouts(lease=30.0),
    )
    assert (info.items, info.metrics) == (("model", "note"), {"loss": 0.5})
    assert (info.custom_metadata, info.nonfinite_leaves) == ({"seen": 1}, 0)
    assert {each.phase for each in events} >= {"encode", "write", "end"}
    with pytest.raises(StepExistsError):
        ckpt.sync.save(path, {"w": W})
    ckpt.sync.save(path, {"w": W}, if_exists="replace")
    assert list(ckpt.sync.load(path)) == ["w"]
    commit = ckpt.sync.save(tmp_path / "later", {"w": W}, durable=False)
    assert isinstance(commit, ckpt.Commit)
    assert commit.result(60).path == str(tmp_path / "later")


def test_times_after_which_saves_are_given_up(tmp_path: Path) -> None:
    gate = Gate()
    handlers = [GateHandler()]
    with pytest.raises(ckpt.errors.DeadlineExceededError):
        ckpt.sync.save(tmp_path / "x", items={"gate": gate}, handlers=handlers, timeout=0.01)
    gate.open()


def test_what_is_loaded(root: Path, tmp_path: Path) -> None:
    assert np.array_equal(ckpt.sync.load(root / "2", at="params")["w"], W + 2)
    target = ckpt.abstract({"params": {"w": jnp.asarray(W)}, "n": 0})
    assert target["params"]["w"] == jax.ShapeDtypeStruct((256, 512), np.float32)
    mean = ckpt.sync.merge({root / "1": 0.5, root / "3": 0.5}, at="params")
    assert np.array_equal(mean["w"], W + 2)
    for number in (1, 3):
        ckpt.sync.save(tmp_path / f"{number}", items={"a": {"w": W * number}, "b": {"w": W}})
    mean = ckpt.sync.merge({tmp_path / "1": 0.5, tmp_path / "3": 0.5}, items=["a"])
    assert list(mean) == ["a"]
    assert np.array_equal(mean["a"]["w"], W * 2)


def test_what_is_restored(mgr: ckpt.sync.CheckpointManager) -> None:
    assert mgr.restore(1)["n"] == 1
    assert mgr.restore(at="params").keys() == {"w"}
    mgr.save(4, items={"model": state(4), "note": "x"}).result()
    assert mgr.restore(4, items=["note"]) == {"note": "x"}
    assert mgr.metadata(2).tree["n"] == 2
    assert mgr.metrics(2) == {"loss": 2.0, "seen": -2.0}
    assert (mgr.best_step("loss", "max"), mgr.best_step("seen", "max")) == (3, 1)
    mgr.delete(2)
    assert mgr.all_steps() == [1, 3, 4]


def test_only_healthy_steps(tmp_path: Path) -> None:
    signs = [ckpt.extensions.VitalSigns()]
    with ckpt.sync.CheckpointManager(tmp_path, extensions=signs) as mgr:
        mgr.save(1, {"w": W, "n": 1})
        mgr.save(2, {"w": W * np.nan, "n": 2})
        mgr.wait_until_finished()
        assert (mgr.restore()["n"], mgr.restore(healthy=True)["n"]) == (2, 1)


@pytest.mark.parametrize("memory", ["jax", "buffers", "files"])
def test_where_arrays_are_restored(memory: Any, tmp_path: Path) -> None:
    big = jnp.ones((1024, 1024))
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, {"w": big}).result()
        found = mgr.restore(1, {"w": big}, memory=memory)
        assert np.array_equal(found["w"], big)
    with pytest.raises(InvalidArgumentError, match="memory"):
        ckpt.sync.load(tmp_path / "1", {"w": big}, memory="disk")  # type: ignore[arg-type]


def test_a_damaged_step_is_passed_over_or_not(root: Path) -> None:
    for data in (root / "3" / "default" / "d").iterdir():
        data.write_bytes(bytes(data.stat().st_size))
    with ckpt.sync.CheckpointManager(root) as mgr:
        start, found = mgr.resume(state(0))
        assert (start, found["n"]) == (3, 2)
    with (
        ckpt.sync.CheckpointManager(root, mode="r") as mgr,
        pytest.raises(CorruptCheckpointError),
    ):
        mgr.resume(state(0), fallback=False)


def test_what_is_saved(tmp_path: Path) -> None:
    formats = {"w": ckpt.ArrayFormat(compression=ckpt.Zstd(3))}
    with ckpt.sync.CheckpointManager(tmp_path, formats=formats) as mgr:
        info = mgr.save(
            1,
            items={"model": {"w": W * 0}, "note": "x"},
            metrics={"loss": 0.5},
            custom_metadata={"seen": 1},
            durable=True,
            timeout=60,
        )
        assert isinstance(info, ckpt.StepInfo)
        assert (info.items, info.metrics) == (("model", "note"), {"loss": 0.5})
        assert info.custom_metadata == {"seen": 1}
        with mgr.partial(2, metrics={"loss": 1.5}, custom_metadata={"seen": 2}) as part:
            part.save(items={"model": {"w": W}})
        assert mgr.metrics(2) == {"loss": 1.5}
        assert mgr.metadata(2).info.custom_metadata == {"seen": 2}
    manifest = ckpt.manifest.decode((tmp_path / "1" / "ckpt.json").read_bytes(), where="here")
    assert [leaf.codec for leaf in manifest.items["model"].leaves] == ["zstd"] == [ckpt.Zstd().name]


def test_a_save_that_takes_too_long(tmp_path: Path) -> None:
    gate = Gate()
    with ckpt.sync.CheckpointManager(tmp_path, handlers=[GateHandler()]) as mgr:
        with pytest.raises(ckpt.errors.DeadlineExceededError):
            mgr.save(1, items={"gate": gate}, durable=True, timeout=0.01)
        commit = mgr.save(2, items={"gate": gate})
        waits: tuple[Callable[..., object], ...] = (
            *(commit.result, commit.exception, commit.in_root.result),
        )
        opening = threading.Timer(5.0, gate.open)
        opening.start()
        for wait in waits:
            with pytest.raises(ckpt.errors.CommitTimeoutError):
                wait(timeout=0.01)
        opening.cancel()
        gate.open()
        assert commit.exception(timeout=60) is None


def test_of_a_snapshot(tmp_path: Path) -> None:
    with (
        shared_memory() as memory,
        ckpt.sync.CheckpointManager(
            tmp_path, tiers=[ckpt.tiers.SharedMemory(directory=str(memory))]
        ) as mgr,
    ):
        commit = mgr.snapshot(7, {"n": 7}, metrics={"loss": 0.5}, custom_metadata={"seen": 1})
        info = commit.result(60)
        assert (info.step, info.metrics, info.custom_metadata) == (7, {"loss": 0.5}, {"seen": 1})
        assert mgr.restore(7) == {"n": 7}


def test_of_a_tier(tmp_path: Path) -> None:
    near, root = tmp_path / "disk", tmp_path / "run"
    tier = ckpt.tiers.Tier(near, keep=ckpt.keep.Latest(1))
    with ckpt.sync.CheckpointManager(root, tiers=[tier]) as mgr:
        for step in (1, 2, 3):
            mgr.save(step, {"n": step}).in_root.result(60)
    for place, steps in ((near, ["3"]), (root, ["1", "2", "3"])):
        assert sorted(each.name for each in place.iterdir() if each.name.isdigit()) == steps


def test_of_the_memory_for_staging() -> None:
    assert ckpt.Staging(budget_bytes=2 << 20).effective_budget == 2 << 20
    assert 1 << 20 <= ckpt.Staging().effective_budget <= 1 << 50
    assert (ckpt.Staging().mode, ckpt.Staging(mode="device").mode) == ("auto", "device")
    with pytest.raises(InvalidArgumentError, match="mode"):
        ckpt.Staging(mode="disk")  # type: ignore[arg-type]


def test_of_a_preemption(root: Path) -> None:
    policy = ckpt.save_when.Preempted([signal.SIGUSR1])
    with ckpt.sync.CheckpointManager(root, save_when=policy) as mgr:
        assert not mgr.reached_preemption(5)
        signal.raise_signal(signal.SIGUSR1)
        # The answer for a step stays what it was.
        assert (mgr.reached_preemption(5), mgr.reached_preemption(6)) == (False, True)


def test_a_part_is_verified(mgr: ckpt.sync.CheckpointManager, root: Path) -> None:
    assert mgr.verify(2, deep=False).deep is False
    assert ckpt.sync.verify(root / "2", deep=False).deep is False
    # Where the largest file comes last, all are read for this share of the bytes.
    assert any(mgr.verify(2, sample=0.3).is_partial for _ in range(8))
    assert any(ckpt.sync.verify(root / "2", sample=0.3).is_partial for _ in range(8))
    # A seed repeats a choice.
    read = [mgr.verify(2, sample=0.3, seed=seed).nbytes for seed in range(6)]
    assert read == [mgr.verify(2, sample=0.3, seed=seed).nbytes for seed in range(6)]
    assert read == [ckpt.sync.verify(root / "2", sample=0.3, seed=seed).nbytes for seed in range(6)]
    assert len(set(read)) > 1


def test_what_is_watched(mgr: ckpt.sync.CheckpointManager, root: Path) -> None:
    options: dict[str, Any] = {"timeout": 60, "poll_interval": 0.01}
    assert [info.step for info in mgr.watch(after=1, until=3, **options)] == [2, 3]
    assert [info.step for info in mgr.watch(only_latest=True, until=3, **options)] == [3]
    assert [info.step for info in mgr.watch(until=9, timeout=0.01, min_interval=0.0)] == [1, 2, 3]
    for pin, pinned in ((True, [1]), (False, [])):
        with mgr.watch(pin=pin, until=1) as steps:
            assert [list(mgr.pins()) for _ in steps] == [pinned]
        seen = []
        with ckpt.sync.watch(root, pin=pin, until=1, timeouts=ckpt.Timeouts(lease=30)) as steps:
            for _ in steps:
                seen += list(mgr.pins())
        assert seen == pinned


def test_what_is_converted(root: Path, tmp_path: Path) -> None:
    names = ckpt.step_names.Standard("ckpt", 4)
    options: dict[str, Any] = {"step": 5, "step_names": names}
    path = tmp_path / "other" / "ckpt_0005"
    formats = {"params.w": ckpt.ArrayFormat(compression=ckpt.Blosc())}
    ckpt.sync.convert(root / "2", tmp_path / "other", formats=formats, **options)
    assert np.array_equal(ckpt.sync.load(path)["params"]["w"], W + 2)
    manifest = ckpt.manifest.decode((path / "ckpt.json").read_bytes(), where="here")
    assert [leaf.codec for leaf in manifest.items["default"].leaves] == [None, "blosc"]
    assert ckpt.Blosc().name == "blosc"
    named = ckpt.exports.Safetensors(names=lambda leaf: f"model.{leaf}")
    ckpt.sync.convert(root / "2", tmp_path / "named", format=named, at="params")
    assert list(safetensors.numpy.load_file(tmp_path / "named")) == ["model.w"]
    ckpt.sync.convert(root / "2", tmp_path / "z", format=ckpt.exports.Zarr(), at="params")
    assert (tmp_path / "z" / "w" / "zarr.json").is_file()
    target = tmp_path / "w.safetensors"
    done = ckpt.sync.convert(root / "2", target, format="safetensors", at="params")
    assert (done.format, done.arrays, done.nbytes) == ("safetensors", 1, W.nbytes)
    info = ckpt.sync.adopt(target, tmp_path / "adopted", **options)
    assert (info.step, info.path) == (5, str(tmp_path / "adopted" / "ckpt_0005"))
