"""What `ckpt_orbax` writes Orbax reads and goes on with, and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.training import checkpoints

import ckpt
import ckpt_orbax


def state(number: int) -> dict[str, Any]:
    return {"w": jnp.full((4, 2), float(number)), "b": [np.full(3, number)], "step": number}


def composite(module: Any, number: int) -> Any:
    return module.args.Composite(
        model=module.args.StandardSave(state(number)), config=module.args.JsonSave({"n": number})
    )


def is_state(found: Any, number: int) -> bool:
    return (
        bool(np.array_equal(found["w"], state(number)["w"]))
        and bool(np.array_equal(found["b"][0], state(number)["b"][0]))
        and int(found["step"]) == number
    )


@pytest.mark.parametrize(
    ("first", "second"), [(ocp, ckpt_orbax), (ckpt_orbax, ocp)], ids=["from", "to"]
)
def test_a_run_goes_on_with_the_other_module(first: Any, second: Any, tmp_path: Path) -> None:
    given = {"max_to_keep": 2, "save_interval_steps": 2}
    options = first.CheckpointManagerOptions(**given)
    with first.CheckpointManager(tmp_path, options=options, metadata={"v": 1}) as mngr:
        for step in range(5):
            mngr.save(step, args=first.args.StandardSave(state(step)), custom_metadata={"s": step})
    options = second.CheckpointManagerOptions(**given)
    with second.CheckpointManager(tmp_path, options=options) as mngr:
        assert mngr.all_steps() == [2, 4]
        assert mngr.metadata().custom_metadata == {"v": 1}
        assert mngr.metadata(4).custom_metadata == {"s": 4}
        assert is_state(mngr.restore(4), 4)
        assert is_state(mngr.restore(2, args=second.args.StandardRestore(state(0))), 2)
        for step in range(5, 8):
            mngr.save(step, args=second.args.StandardSave(state(step)))
        assert mngr.all_steps() == [4, 6]
    # And back.
    with first.CheckpointManager(tmp_path, options=first.CheckpointManagerOptions()) as mngr:
        assert mngr.all_steps() == [4, 6]
        assert is_state(mngr.restore(6, args=first.args.StandardRestore(state(0))), 6)


@pytest.mark.parametrize(
    ("first", "second"), [(ocp, ckpt_orbax), (ckpt_orbax, ocp)], ids=["from", "to"]
)
def test_several_items_and_metrics(first: Any, second: Any, tmp_path: Path) -> None:
    given = {"best_fn": lambda metrics: metrics["loss"], "best_mode": "min", "max_to_keep": 2}
    options = first.CheckpointManagerOptions(**given)
    with first.CheckpointManager(tmp_path, options=options) as mngr:
        for step, loss in enumerate((3.0, 1.0, 2.0)):
            mngr.save(step, args=composite(first, step), metrics={"loss": loss})
    options = second.CheckpointManagerOptions(**given)
    with second.CheckpointManager(tmp_path, options=options) as mngr:
        assert (mngr.all_steps(), mngr.best_step()) == ([1, 2], 1)
        assert mngr.metrics(1) == {"loss": 1.0}
        args = second.args.Composite(
            model=second.args.StandardRestore(state(0)), config=second.args.JsonRestore()
        )
        found = mngr.restore(1, args=args)
        assert is_state(found.model, 1)
        assert found.config == {"n": 1}


@pytest.mark.parametrize(
    ("first", "second"), [(ocp, ckpt_orbax), (ckpt_orbax, ocp)], ids=["from", "to"]
)
def test_an_item_called_metadata(first: Any, second: Any, tmp_path: Path) -> None:
    with first.CheckpointManager(tmp_path, metadata={"v": 1}) as mngr:
        args = first.args.Composite(
            metadata=first.args.JsonSave({"n": 1}), state=first.args.StandardSave(state(1))
        )
        mngr.save(1, args=args, custom_metadata={"s": 1})
    with second.CheckpointManager(tmp_path) as mngr:
        args = second.args.Composite(metadata=second.args.JsonRestore())
        assert mngr.restore(1, args=args).metadata == {"n": 1}
        assert mngr.metadata(1).custom_metadata == {"s": 1}
        assert mngr.metadata().custom_metadata == {"v": 1}


def test_a_checkpoint_of_orbax_is_restored_by_a_checkpointer(tmp_path: Path) -> None:
    for number, each in enumerate((ocp.StandardCheckpointer(), ocp.PyTreeCheckpointer())):
        each.save(tmp_path / str(number), state(number))
        if number == 0:
            each.wait_until_finished()
    assert is_state(ckpt_orbax.StandardCheckpointer().restore(tmp_path / "0"), 0)
    assert is_state(ckpt_orbax.PyTreeCheckpointer().restore(tmp_path / "1", item=state(0)), 1)


def test_a_checkpoint_is_restored_by_a_checkpointer_of_orbax(tmp_path: Path) -> None:
    ckpt_orbax.PyTreeCheckpointer().save(tmp_path / "a", state(3))
    assert is_state(ocp.StandardCheckpointer().restore(tmp_path / "a", state(0)), 3)
    assert is_state(ocp.PyTreeCheckpointer().restore(tmp_path / "a"), 3)
    assert is_state(checkpoints.restore_checkpoint(str(tmp_path / "a"), state(0)), 3)
    found = ocp.StandardCheckpointer().metadata(tmp_path / "a").item_metadata
    assert found["w"].shape == (4, 2)


def test_its_steps_are_steps_of_ckpt(tmp_path: Path) -> None:
    with ckpt_orbax.CheckpointManager(tmp_path) as mngr:
        mngr.save(7, args=ckpt_orbax.args.StandardSave(state(7)))
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        assert mgr.verify(7).ok
        assert is_state(mgr.restore(7), 7)
        start, found = mgr.resume(lambda: state(0))
        assert start == 8
        assert is_state(found, 7)
