"""A run that begins from a checkpoint of another one: what it takes from it, and what it says."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pydantic
import pytest

import ckpt
from ckpt import errors
from ckpt.sync import CheckpointManager
from ckpt.testing.compare import differences
from tests.support.simulated_job import FAR, STATE, closed, managers, saved, steps, together


def state_of(value: float) -> dict[str, Any]:
    return {"w": jnp.full((4, 3), value, jnp.float32), "count": jnp.int32(value)}


def init_state() -> dict[str, Any]:
    return state_of(0)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    with CheckpointManager(tmp_path / "base") as mgr:
        mgr.save(10, state_of(10), durable=True)
        mgr.save(20, state_of(20), durable=True)
    return tmp_path / "base"


def parent_of(info: ckpt.StepInfo) -> ckpt.manifest.Parent:
    assert info.parent is not None
    return info.parent


def value_of(state: Any) -> float:
    assert np.ptp(state["w"]) == 0
    assert int(state["count"]) == int(state["w"][0, 0])
    return float(state["w"][0, 0])


def test_a_new_run_begins_from_the_source_and_goes_on_from_its_own(
    tmp_path: Path, base: Path
) -> None:
    for times in range(3):
        with CheckpointManager(tmp_path / "tuned") as mgr:
            start, state = mgr.resume(init_state, source=base / "10")
            assert (start, value_of(state)) == ((0, 10) if times == 0 else (times, 10 + times))
            mgr.save(start, state_of(value_of(state) + 1), durable=True)
    with CheckpointManager(tmp_path / "tuned") as mgr:
        assert mgr.all_steps() == [0, 1, 2]
        for step in mgr.all_steps():
            parent = parent_of(mgr.metadata(step).info)
            assert (parent.path, parent.step) == (str(base / "10"), 10)
        assert f"from {base / '10'}" in str(mgr.metadata())


def test_the_parent_stays_when_the_source_is_not_given_again(tmp_path: Path, base: Path) -> None:
    with CheckpointManager(tmp_path / "tuned") as mgr:
        _, state = mgr.resume(init_state, source=base / "20")
        info = mgr.save(1, state).result()
        assert parent_of(info).step == 20
    with CheckpointManager(tmp_path / "tuned") as mgr:
        _, state = mgr.resume(init_state)
        info = mgr.save(2, state).result()
        assert (parent_of(info).path, parent_of(info).step) == (str(base / "20"), 20)
        assert ckpt.sync.metadata(info.path).info.parent == info.parent
    # A copy of the base at that path would be another one.
    manifest = ckpt.manifest.decode((base / "20/ckpt.json").read_bytes(), where="")
    assert parent_of(info).attempt == manifest.attempt


def test_what_is_known_of_a_step_can_be_served(tmp_path: Path, base: Path) -> None:
    """A service answers with a `StepInfo`, which pydantic then has to know."""
    with CheckpointManager(tmp_path / "tuned") as mgr:
        _, state = mgr.resume(init_state, source=base / "20")
        info = mgr.save(1, state).result()
    served = pydantic.TypeAdapter(ckpt.StepInfo)
    assert served.validate_json(served.dump_json(info)) == info


def test_a_run_from_scratch_has_no_parent(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as mgr:
        _, state = mgr.resume(init_state)
        assert mgr.save(1, state).result().parent is None
        assert mgr.metadata().info.parent is None
    assert b'"parent"' not in (tmp_path / "1/ckpt.json").read_bytes()


def test_a_step_saved_in_parts_names_it(tmp_path: Path, base: Path) -> None:
    with CheckpointManager(tmp_path / "tuned") as mgr:
        _, state = mgr.resume(init_state, source=base / "20")
        with mgr.partial(1) as part:
            part.save(state)
        assert parent_of(mgr.metadata(1).info).step == 20


def test_with_asyncio_and_by_items(tmp_path: Path, base: Path) -> None:
    ckpt.sync.save(tmp_path / "source", items={"params": state_of(3), "other": {"x": jnp.ones(2)}})

    async def main() -> None:
        async with ckpt.CheckpointManager(tmp_path / "tuned") as mgr:
            start, found = await mgr.resume(
                items={"params": init_state}, source=tmp_path / "source"
            )
            assert (start, value_of(found["params"])) == (0, 3)
            assert set(found) == {"params"}
            info = await (await mgr.save(0, items=found))
            assert (parent_of(info).path, parent_of(info).step) == (str(tmp_path / "source"), None)

    asyncio.run(main())


def test_how_the_source_may_differ_is_about_the_source(tmp_path: Path, base: Path) -> None:
    def init_tuned() -> dict[str, Any]:
        return {"kernel": jnp.zeros((4, 3)), "adapter": jnp.full(2, 0.5)}

    adapt = ckpt.Adapt(rename={"w": "kernel"}, missing="keep", extra="ignore")
    with CheckpointManager(tmp_path / "strict") as mgr:
        with pytest.raises(errors.TargetMismatchError):
            mgr.resume(init_tuned, source=base / "10")
        assert mgr.all_steps() == []
    with CheckpointManager(tmp_path / "tuned") as mgr:
        _, state = mgr.resume(init_tuned, source=base / "10", adapt=adapt)
        assert float(state["kernel"][0, 0]) == 10
        # The source does not have it, so it is that of the fresh state.
        assert np.array_equal(state["adapter"], [0.5, 0.5])
        mgr.save(1, {"kernel": state["kernel"] + 1, "adapter": state["adapter"] + 1}, durable=True)
        # A step of this run agrees with the target; there is no `w` to be renamed.
        start, state = mgr.resume(init_tuned, source=base / "10", adapt=adapt)
        assert (start, float(state["kernel"][0, 0])) == (2, 11)
        mgr.save(2, state_of(5), durable=True)
        with pytest.raises(errors.TargetMismatchError):
            mgr.resume(init_tuned, source=base / "10", adapt=adapt)


def test_a_source_that_orbax_wrote(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "orbax") as manager:
        manager.save(7, args=ocp.args.StandardSave(state_of(7)))
        manager.wait_until_finished()
    with CheckpointManager(tmp_path / "tuned") as mgr:
        start, state = mgr.resume(init_state, source=tmp_path / "orbax" / "7")
        assert (start, value_of(state)) == (0, 7)
        assert parent_of(mgr.save(0, state).result()).path == str(tmp_path / "orbax" / "7")


def test_a_source_that_is_none(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "tuned") as mgr:
        with pytest.raises(errors.NotACheckpointError, match="nothing"):
            mgr.resume(init_state, source=tmp_path / "nothing")
        assert mgr.save(0, state_of(0)).result().parent is None


def test_a_root_as_the_source_is_told_what_it_holds(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        mgr.save(7, {"w": 1}, durable=True)
    with (
        ckpt.sync.CheckpointManager(tmp_path / "tuned") as mgr,
        pytest.raises(errors.NotACheckpointError, match=r"run is a root with the steps 7, not one"),
    ):
        mgr.resume({"w": 0}, source=tmp_path / "run")


def test_it_is_said_once(tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="ckpt")
    with CheckpointManager(tmp_path / "tuned") as mgr:
        mgr.resume(init_state, source=base / "10")
    said = [each.getMessage() for each in caplog.records if "a new run begins" in each.getMessage()]
    assert len(said) == 1
    assert str(base / "10") in said[0]


def test_all_processes_begin_from_it(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "source", STATE)
    job = managers(tmp_path / "tuned", 2, seconds=FAR)
    found = together(*(lambda m=m: m.resume(STATE, source=tmp_path / "source") for m in job))
    assert [start for start, _ in found] == [0, 0]
    assert all(not differences(STATE, state) for _, state in found)
    assert steps(saved(job, 0)) == [0, 0]
    closed(job)
    assert parent_of(ckpt.sync.metadata(tmp_path / "tuned/0").info).path == str(tmp_path / "source")
