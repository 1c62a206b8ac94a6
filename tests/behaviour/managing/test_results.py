"""Every member of what calls return is what was saved, deleted, pinned or converted."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import ckpt
import ckpt.sync
from tests.support.gated_item import Gate, GateHandler

W = np.arange(64, dtype=np.float32).reshape(8, 8)
SOON = timedelta(minutes=10)


class Point(NamedTuple):
    x: Any
    y: Any


def state() -> dict[str, Any]:
    w = jnp.asarray(W)
    return {
        "key": jax.random.key(7, impl="threefry2x32"),
        "n": 3,
        "tied": w,
        "w": w,
        "weak": jnp.asarray(2.0),
        "function": len,
    }


@pytest.fixture
def mgr(tmp_path: Path) -> Iterator[ckpt.sync.CheckpointManager]:
    signs = [ckpt.extensions.VitalSigns()]
    with ckpt.sync.CheckpointManager(tmp_path / "run", extensions=signs, trash="trash") as made:
        yield made


def test_of_a_save(mgr: ckpt.sync.CheckpointManager, tmp_path: Path) -> None:
    before = datetime.now(UTC)
    commit = mgr.save(3, state(), metrics={"loss": 0.5}, custom_metadata={"seen": 9})
    info = commit.result(60)
    assert (commit.step, commit.done(), commit.stage, commit.skipped) == (3, True, "done", None)
    assert not commit.cancel()
    nbytes = W.nbytes + 4 + 8
    commit.in_root.result(60)
    assert commit.in_root.done()
    assert (info.step, info.path, info.nbytes) == (3, str(tmp_path / "run" / "3"), nbytes)
    assert info.items == ("default",)
    assert (info.metrics, info.custom_metadata) == ({"loss": 0.5}, {"seen": 9})
    assert before - SOON < info.created <= info.committed < before + SOON
    assert info.time_of(1_500_000_000_000_000_000) == datetime(2017, 7, 14, 2, 40, tzinfo=UTC)
    assert (info.nonfinite_leaves, info.unequal_leaves) == (0, 0)
    assert (info.parent, info.dropped, info.tiers) == (None, (), ())
    times = info.statistics
    assert 0 < (times.blocked or 0) <= (times.written or 0)
    assert (times.merged or 0) > 0
    assert (times.published or 0) > 0


def test_of_a_manager(tmp_path: Path) -> None:
    events: list[ckpt.types.Event] = []
    gate = Gate()
    with ckpt.sync.CheckpointManager(
        tmp_path,
        handlers=[GateHandler()],
        observers=[events.append],
        save_when=ckpt.save_when.EverySteps(10),
    ) as mgr:
        assert mgr.directory == tmp_path
        refused = mgr.save(5, {"w": W})
        assert (bool(refused), refused.done(), refused.stage) == (False, True, "skipped")
        assert "5" in (refused.skipped or "")
        mgr.save(10, {"w": W}).result()
        commit = mgr.save(20, items={"gate": gate})
        try:
            assert (mgr.is_saving_in_progress(), mgr.steps_in_progress()) == (True, [20])
            assert not commit.done()
            assert commit.cancel()
        finally:
            gate.open()
        assert isinstance(commit.exception(60), ckpt.errors.CommitCancelledError)
        mgr.wait_until_finished()
        assert commit.stage == "failed"
        assert (mgr.is_saving_in_progress(), mgr.steps_in_progress()) == (False, [])
        assert [info.step for info in mgr.steps()] == [10]
        with pytest.raises(ckpt.errors.UnsupportedLeafError):
            mgr.save(30, {"w": object()})
    ends = [each for each in events if each.phase == "end"]
    assert [(each.operation, each.step, each.outcome) for each in ends] == [
        *(("save", 5, "skipped"), ("save", 10, "ok")),
        *(("save", 20, "cancelled"), ("save", 30, "failed")),
    ]
    assert [each.nbytes for each in ends] == [0, W.nbytes, 0, 0]
    assert ["object" in (each.reason or "") for each in ends] == [False, False, False, True]
    assert all(0 < each.began_ns <= each.ended_ns for each in ends)


def test_of_a_manager_that_is_closed(tmp_path: Path) -> None:
    mgr = ckpt.sync.CheckpointManager(tmp_path)
    mgr.save(1, {"w": W})
    mgr.close()
    assert np.array_equal(ckpt.sync.load(tmp_path / "1")["w"], W)
    with pytest.raises(ckpt.errors.ClosedError):
        mgr.save(2, {"w": W})


def test_of_the_progress_of_a_save(mgr: ckpt.sync.CheckpointManager) -> None:
    commit = mgr.save(3, {"w": W})
    commit.result(60)
    done = commit.progress
    assert (done.staged, done.written, done.total, done.fraction) == (256, 256, 256, 1.0)


def test_of_metadata(mgr: ckpt.sync.CheckpointManager) -> None:
    mgr.save(3, state()).result()
    found = mgr.metadata(3)
    assert found.info.step == 3
    assert (found.unnamed, found.unknown_classes, found.unreadable) == (True, {}, {})
    assert found.writer["numpy"] == np.__version__
    assert found.items == {"default": found.tree}
    assert set(found.leaves["default"]) == set(state())
    assert (found.tree["n"], found.tree["function"]) == (3, ...)
    w, key = found.tree["w"], found.tree["key"]
    # Of two leaves that are one array the first one has it.
    assert (found.tree["tied"].same_as, w.same_as) == (None, "tied")
    assert (w.name, w.kind, w.shape, w.dtype) == ("w", "jax", (8, 8), np.float32)
    assert (w.chunks, w.nbytes, w.impl, w.weak_type) == ((8, 8), W.nbytes, None, False)
    assert (w.sharding, ckpt.extensions.VitalSigns.unequal_on(w)) == (None, ())
    assert (key.kind, key.impl, key.shape, key.nbytes) == ("key", "threefry2x32", (), 8)
    assert found.tree["weak"].weak_type
    signs = ckpt.extensions.VitalSigns.of(found.tree["tied"])
    assert signs is not None
    assert (signs.nonfinite, signs.absmax) == (0, 63)
    assert signs.norm == pytest.approx(float(np.linalg.norm(W)))
    assert len(bytes.fromhex(signs.fingerprint)) == 8


def test_targets_with_shardings(mgr: ckpt.sync.CheckpointManager) -> None:
    mgr.save(3, state()).result()
    found = mgr.metadata(3)
    place = SingleDeviceSharding(jax.devices()[1])
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    rows = NamedSharding(mesh, PartitionSpec("x"))
    target = found.target(place)
    target["w"] = found.tree["w"].with_sharding(rows)
    assert target["w"].sharding == rows
    restored = mgr.restore(3, target)
    assert (restored["w"].sharding, restored["weak"].sharding) == (rows, place)
    assert np.array_equal(restored["w"], W)


def test_of_items_that_are_no_trees(mgr: ckpt.sync.CheckpointManager) -> None:
    mgr.save(3, items={"model": {"w": W}, "note": "by hand"}).result()
    found = mgr.metadata(3)
    assert (found.unnamed, found.info.items) == (False, ("model", "note"))
    assert found.tree == {"model": found.items["model"], "note": found.items["note"]}
    note = found.items["note"]
    assert isinstance(note, ckpt.types.ItemInfo)
    assert (note.handler, note.nbytes) == ("bytes", len("by hand"))
    assert note.data == {"type": "str"}


def test_of_a_class_that_is_gone(
    mgr: ckpt.sync.CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    mgr.save(3, {"point": Point(1, W)}).result()
    monkeypatch.delattr(sys.modules[__name__], "Point")
    found = mgr.metadata(3)
    (name,) = found.unknown_classes
    node = found.tree["point"]
    assert isinstance(node, ckpt.types.UnknownNode)
    assert (node.class_name, node.kind, list(node.fields)) == (name, "namedtuple", ["x", "y"])
    assert (node["x"], node.static, node.unstored) == (1, None, ())
    assert name == f"{__name__}:Point"


def test_of_pins_and_the_trash(mgr: ckpt.sync.CheckpointManager, tmp_path: Path) -> None:
    before = datetime.now(UTC)
    for step in (1, 2):
        mgr.save(step, {"w": W})
    mgr.wait_until_finished()
    mgr.pin(2, "paper")
    (pin,) = mgr.pins()[2]
    assert (pin.step, pin.name, pin.seconds) == (2, "paper", None)
    assert str(os.getpid()) in pin.owner
    assert socket.gethostname() in pin.owner
    mgr.delete(1)
    (trashed,) = mgr.trash.steps()
    assert trashed.step == 1
    assert Path(trashed.path).parent == tmp_path / "run" / "trash"
    assert before - SOON < trashed.deleted < before + SOON
    mgr.trash.undelete(1)
    assert mgr.all_steps() == [1, 2]
    mgr.delete(1)
    assert mgr.trash.empty(older_than=3600) == []
    assert mgr.trash.empty() == [1]
    assert mgr.trash.steps() == []


def test_of_a_partial_save(mgr: ckpt.sync.CheckpointManager) -> None:
    part = mgr.partial(1, metrics={"loss": 2.0}, custom_metadata={"seen": 5})
    part.save({"a": W})
    part.save({"b": 2})
    info = part.finalize()
    assert (part.step, part.info) == (1, info)
    assert (info.metrics, info.custom_metadata) == ({"loss": 2.0}, {"seen": 5})
    assert mgr.restore(1)["b"] == 2
    other = mgr.partial(2)
    other.save(items={"model": {"w": W}})
    other.discard()
    assert mgr.all_steps() == [1]


def test_of_a_conversion(mgr: ckpt.sync.CheckpointManager, tmp_path: Path) -> None:
    mgr.save(1, {"model": {"w": W, "b": W[0]}}).result()
    target = tmp_path / "model.safetensors"
    done = ckpt.sync.convert(tmp_path / "run" / "1", target, format="safetensors", at="model")
    assert (done.path, done.format) == (str(target), "safetensors")
    assert (done.arrays, done.nbytes) == (2, W.nbytes + W[0].nbytes)
    assert 0 < done.seconds < SOON.total_seconds()


def test_of_an_array(mgr: ckpt.sync.CheckpointManager, tmp_path: Path) -> None:
    mgr.save(1, {"w": W}).result()
    array = ckpt.sync.open_array(tmp_path / "run" / "1", "w")
    assert (array.shape, array.dtype, array.nbytes) == ((8, 8), np.float32, W.nbytes)
    assert array.chunks == (8, 8)
    assert np.array_equal(array[2:4, 1], W[2:4, 1])


def test_of_a_deleted_item(mgr: ckpt.sync.CheckpointManager) -> None:
    before = datetime.now(UTC)
    mgr.save(1, items={"model": {"w": W}, "opt": {"m": W}}).result()
    mgr.delete(1, item="opt")
    (dropped,) = mgr.metadata(1).info.dropped
    assert (dropped.item, dropped.policy) == ("opt", None)
    assert dropped.nbytes >= W.nbytes
    assert before - SOON < dropped.dropped < before + SOON


def test_of_a_run_that_began_from_another(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "first", {"w": W})
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        mgr.resume({"w": W}, source=tmp_path / "first")
        parent = mgr.save(1, {"w": W}).result().parent
    assert parent is not None
    assert parent.path == str(tmp_path / "first")


def test_of_values_that_are_not_finite(mgr: ckpt.sync.CheckpointManager) -> None:
    info = mgr.save(1, {"a": np.array([1, np.nan, np.inf]), "b": W}).result()
    assert info.nonfinite_leaves == 1
    signs = ckpt.extensions.VitalSigns.of(mgr.metadata(1).tree["a"])
    assert signs is not None
    assert signs.nonfinite == 2


def test_of_damage(mgr: ckpt.sync.CheckpointManager, tmp_path: Path) -> None:
    mgr.save(1, {"w": W}).result()
    step = tmp_path / "run" / "1"
    whole = mgr.verify(1)
    files = [each for each in step.rglob("*") if each.is_file()]
    assert (whole.ok, whole.problems, whole.step, whole.path) == (True, (), 1, str(step))
    assert (whole.deep, whole.files, whole.unlisted) == (True, len(files), ())
    # The manifest has a digest of its own.
    listed = [each for each in files if each.name != "ckpt.json"]
    assert whole.nbytes == sum(each.stat().st_size for each in listed)
    assert 0 < whole.seconds < SOON.total_seconds()
    (data,) = (each for each in files if each.read_bytes() == W.tobytes())
    data.write_bytes(bytes(W.nbytes))
    (step / "default" / "mine").write_text("of others")
    report = mgr.verify(1)
    assert (report.ok, report.unlisted) == (False, ("default/mine",))
    (problem,) = report.problems
    assert (problem.item, problem.leaf) == ("default", "w")
    assert problem.file == str(data.relative_to(step))
    assert problem.message.startswith("was changed")
