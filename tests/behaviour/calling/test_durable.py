"""Saves that return when the step is durable, and commits of saves that were skipped."""

from __future__ import annotations

from pathlib import Path

import anyio
import jax.numpy as jnp
import pytest

import ckpt
import ckpt.sync
from ckpt import errors
from tests.support.gated_item import PATIENCE_S, Gate, GateHandler


def test_what_a_durable_save_returns_is_there(tmp_path: Path) -> None:
    async def main() -> None:
        async with ckpt.CheckpointManager(tmp_path / "a") as mgr:
            info = await mgr.save(3, {"w": jnp.ones(3)}, metrics={"loss": 1}, durable=True)
            assert info is not None
            assert (info.step, info.metrics) == (3, {"loss": 1.0})
            assert Path(info.path, "ckpt.json").exists()
            with pytest.raises(errors.StepExistsError):
                await mgr.save(3, {"w": jnp.zeros(3)}, durable=True)

    anyio.run(main)
    with ckpt.sync.CheckpointManager(tmp_path / "b") as mgr:
        info = mgr.save(3, {"w": jnp.ones(3)}, durable=True)
        assert info is not None
        assert Path(info.path, "ckpt.json").exists()
        with pytest.raises(errors.InvalidArgumentError, match="durable=1"):
            mgr.save(4, {"w": jnp.ones(3)}, durable=1)  # type: ignore[call-overload]
        assert mgr.all_steps() == [3]


def test_a_durable_save_waits_for_what_is_written(tmp_path: Path) -> None:
    async def main() -> None:
        gate = Gate()
        async with (
            ckpt.CheckpointManager(tmp_path, handlers=[GateHandler()]) as mgr,
            anyio.create_task_group() as tasks,
        ):
            done = anyio.Event()

            async def save() -> None:
                info = await mgr.save(1, gate, durable=True)
                assert info is not None
                assert info.step == 1
                done.set()

            tasks.start_soon(save)
            await anyio.to_thread.run_sync(gate.reached.wait, PATIENCE_S)
            assert not done.is_set()
            gate.open()
            await done.wait()

    anyio.run(main)


def test_a_cancelled_durable_save_leaves_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        gate = Gate()
        async with ckpt.CheckpointManager(tmp_path, handlers=[GateHandler()]) as mgr:
            async with anyio.create_task_group() as tasks:

                async def save() -> None:
                    await mgr.save(1, gate, durable=True)

                tasks.start_soon(save)
                await anyio.to_thread.run_sync(gate.reached.wait, PATIENCE_S)
                tasks.cancel_scope.cancel()
                gate.open()
            assert await mgr.all_steps() == []
            assert not mgr.is_saving_in_progress()

    anyio.run(main)
    assert [path.name for path in tmp_path.iterdir()] == []


def test_a_skipped_save_has_no_step_to_wait_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with ckpt.CheckpointManager(tmp_path, save_when=ckpt.save_when.EverySteps(10)) as mgr:
            commit = await mgr.save(1, {"w": 1})
            assert not commit
            assert commit.skipped is not None
            with pytest.raises(errors.SaveSkippedError, match=r"not a multiple of 10.*if commit:"):
                await commit
            assert await mgr.save(2, {"w": 1}, durable=True) is None
            assert await mgr.save(2, {"w": 1}, durable=True, force=True) is not None
            assert isinstance(commit.exception(), errors.SaveSkippedError)
            # Not an error of the run.
            await mgr.save(3, {"w": 1})

    anyio.run(main)
    with ckpt.sync.CheckpointManager(tmp_path, save_when=ckpt.save_when.EverySteps(10)) as mgr:
        assert mgr.save(4, {"w": 1}, durable=True) is None
        assert mgr.all_steps() == [2]
