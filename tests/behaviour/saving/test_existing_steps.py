"""A save of a step that exists: skipped if it would store the same, else an error."""

from __future__ import annotations

import logging
import threading
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt import errors
from ckpt.sync import CheckpointManager
from ckpt.testing.compare import differences
from tests.support.gated_item import PATIENCE_S, Gate, GateHandler
from tests.support.simulated_job import closed, kinds, managers, saved, together
from tests.support.trees import sharded


def state(value: float = 1.0) -> dict[str, Any]:
    return {"w": jnp.full((64, 64), value), "b": jnp.arange(8.0), "count": 3, "name": "a"}


def attempt_of(root: Path, step: int) -> str:
    with CheckpointManager(root, mode="r") as mgr:
        found = mgr.metadata(step).info
        return f"{found.created} {found.committed}"


def is_left_alone(root: Path, step: int, before: str) -> bool:
    names = {path.name for path in root.iterdir()}
    return attempt_of(root, step) == before and not [name for name in names if "tmp" in name]


def test_a_resumed_loop_saves_at_its_top(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The very arrays that came from the step are known, so nothing is staged or written."""
    with CheckpointManager(tmp_path) as mgr:
        mgr.save(5, state(), durable=True)
    before = attempt_of(tmp_path, 5)
    events: list[ckpt.types.Event] = []
    caplog.set_level(logging.INFO, "ckpt")
    with CheckpointManager(tmp_path, observers=[events.append]) as mgr:
        start, found = mgr.resume(state(0.0))
        events.clear()
        caplog.clear()
        commit = mgr.save(start - 1, found)
        assert not commit
        assert commit.done()
        assert commit.stage == "skipped"
        assert "restored from" in str(commit.skipped)
        [line] = [it for it in caplog.records if it.levelno == logging.INFO]
        assert "step 5 of" in line.getMessage()
        assert "restored from" in line.getMessage()
        assert {event.phase for event in events} <= {"wait", "end", "begin"}
        with pytest.raises(errors.SaveSkippedError, match="restored from"):
            commit.result(PATIENCE_S)
        assert mgr.save(6, jax.tree.map(lambda x: x, found)).result(PATIENCE_S).step == 6
    assert is_left_alone(tmp_path, 5, before)


def test_equal_values_in_other_arrays_are_skipped_and_others_refused(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as mgr:
        mgr.save(5, state(), metrics={"loss": 1.0}, durable=True)
        before = attempt_of(tmp_path, 5)
        commit = mgr.save(5, state())
        assert (bool(commit), commit.done()) == (False, True)
        assert "holds the same" in str(commit.skipped)
        assert "metrics" not in str(commit.skipped)
        commit = mgr.save(5, state(), metrics={"loss": 2.0})
        assert "its metrics stay what they were" in str(commit.skipped)
        unlike: list[tuple[Any, str]] = [
            (state(2.0), "leaf 'w' has other values"),
            (state() | {"count": 4}, "leaf 'count' has another value"),
            (state() | {"b": jnp.arange(8)}, "leaf 'b' has another type or shape"),
            (state() | {"new": 1}, "only one of them has the leaf 'new'"),
            (list(state().values()), "only one of them has the leaf"),
        ]
        for other, text in unlike:
            with pytest.raises(errors.StepExistsError, match=text) as caught:
                mgr.save(5, other)
            assert "if_exists='replace'" in str(caught.value)
            assert caught.value.step == 5
        assert is_left_alone(tmp_path, 5, before)
        # None of that was a failure that somebody has to be told of.
        assert mgr.save(6, state()).result(PATIENCE_S).step == 6


def test_arrays_that_changed_in_place_are_not_taken_for_what_was_restored(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as mgr:
        mgr.save(5, {"w": np.ones(100), "x": jnp.ones(3)}, durable=True)
    with CheckpointManager(tmp_path) as mgr:
        found = mgr.restore(5)
        found["w"][7] = 2
        with pytest.raises(errors.StepExistsError, match="leaf 'w' has other values"):
            mgr.save(5, found)
        found["w"][7] = 1
        assert not mgr.save(5, found)


def test_what_was_adapted_is_not_taken_for_what_is_stored(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as mgr:
        mgr.save(5, {"w": jnp.ones(3), "x": jnp.ones(3)}, durable=True)
    with CheckpointManager(tmp_path) as mgr:
        like = {"v": jnp.zeros(3), "x": jnp.zeros(3)}
        found = mgr.restore(5, like, adapt=ckpt.Adapt(rename={"w": "v"}))
        with pytest.raises(errors.StepExistsError, match="only one of them has the leaf"):
            mgr.save(5, found)
        part = mgr.restore(5, at="x")
        with pytest.raises(errors.StepExistsError, match="differs"):
            mgr.save(5, part)


def test_the_same_step_on_another_mesh(tmp_path: Path) -> None:
    """Arrays cut otherwise are known as those restored, or by their vital signs, else refused."""
    whole = {"w": sharded(np.arange(2.0**20).reshape(1024, 1024), "data")}
    halves = {"w": sharded(np.arange(2.0**20).reshape(1024, 1024), None, "model")}
    with CheckpointManager(tmp_path / "a") as mgr:
        mgr.save(5, whole, durable=True)
    with CheckpointManager(tmp_path / "a") as mgr:
        with pytest.raises(errors.StepExistsError, match="in other pieces"):
            mgr.save(5, halves)
        assert not mgr.save(5, mgr.restore(5, halves))
    with CheckpointManager(tmp_path / "b", extensions=[ckpt.extensions.VitalSigns()]) as mgr:
        mgr.save(5, whole, durable=True)
        assert not mgr.save(5, halves)
        with pytest.raises(errors.StepExistsError, match="leaf 'w' has other values"):
            mgr.save(5, {"w": halves["w"] + 1})


def test_a_step_that_is_being_saved_is_waited_for(tmp_path: Path) -> None:
    """As by a last save at the end of training; if the first fails, the second is made."""
    gate = Gate()
    with CheckpointManager(tmp_path, handlers=[GateHandler()]) as mgr:
        first = mgr.save(9, gate)
        assert gate.reached.wait(PATIENCE_S)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(mgr.save(9, gate)))
        thread.start()
        with pytest.raises(errors.StepExistsError, match="being saved at the moment"):
            mgr.save(9, gate, if_exists="error")
        skipped = mgr.save(9, gate, if_exists="skip")
        assert "being saved at the moment" in str(skipped.skipped)
        gate.open()
        thread.join(PATIENCE_S)
        assert first.result(PATIENCE_S).step == 9
        assert "holds the same" in str(found[0].skipped)
        again = Gate()
        failing = mgr.save(10, again)
        assert again.reached.wait(PATIENCE_S)
        thread = threading.Thread(target=lambda: found.append(mgr.save(10, again)))
        thread.start()
        assert failing.cancel()
        again.open()
        thread.join(PATIENCE_S)
        assert isinstance(failing.exception(PATIENCE_S), errors.CommitCancelledError)
        assert found[1].result(PATIENCE_S).step == 10


def test_each_way(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as mgr:
        mgr.save(5, state(), durable=True)
        with pytest.raises(errors.StepExistsError, match="already exists and was not changed"):
            mgr.save(5, state(), if_exists="error")
        skipped = mgr.save(5, state(2.0), if_exists="skip")
        assert not skipped
        assert "if_exists='skip'" in str(skipped.skipped)
        assert differences(state(), mgr.restore(5)) == []
        assert mgr.save(5, state(2.0), if_exists="replace").result(PATIENCE_S).step == 5
        assert differences(state(2.0), mgr.restore(5)) == []
        with pytest.raises(errors.InvalidArgumentError, match="if_exists='other': expected one of"):
            mgr.save(5, state(2.0), if_exists="other")  # type: ignore[call-overload]
    with pytest.raises(errors.InvalidArgumentError, match="if_exists='equal': expected one of"):
        ckpt.sync.save(tmp_path / "one", state(), if_exists="equal")  # type: ignore[call-overload]


def test_items_that_are_no_trees_are_compared_too(tmp_path: Path) -> None:
    items: dict[str, Any] = {"model": state(), "config": {"a": [1, "x"]}}
    items["rng"] = np.random.default_rng(1)
    with CheckpointManager(tmp_path, handlers={"config": ckpt.handlers.JsonHandler()}) as mgr:
        mgr.save(5, items=items, durable=True)
        assert not mgr.save(5, items=items | {"rng": np.random.default_rng(1)})
        others: dict[str, Any] = {"config": {"a": [2]}, "rng": np.random.default_rng(2)}
        for name, value in others.items():
            with pytest.raises(errors.StepExistsError, match=f"'{name}' holds something else"):
                mgr.save(5, items=items | {name: value})
        del items["rng"]
        with pytest.raises(errors.StepExistsError, match="only one of them has the item 'rng'"):
            mgr.save(5, items=items)


def test_the_processes_of_a_job_skip_the_same(tmp_path: Path) -> None:
    mgrs = managers(tmp_path)
    assert [each.step for each in saved(mgrs, 5)] == [5, 5]
    again = saved(mgrs, 5)
    assert kinds(again) == [errors.SaveSkippedError] * 2
    assert all("holds the same" in str(each) for each in again)
    other = saved(mgrs, 5, {"a": np.arange(10, dtype=np.int32) + 1, "b": 3})
    assert kinds(other) == [errors.StepExistsError] * 2
    assert all("leaf 'a' has other values" in str(each) for each in other)
    skipped = saved(mgrs, 5, {"a": np.zeros(2), "b": 3}, if_exists="skip")
    assert kinds(skipped) == [errors.SaveSkippedError] * 2
    assert [each.step for each in saved(mgrs, 6)] == [6, 6]
    found = together(*(partial(mgr.restore, 6) for mgr in mgrs))
    assert kinds(saved(mgrs, 6, *found)) == [errors.SaveSkippedError] * 2
    closed(mgrs)
