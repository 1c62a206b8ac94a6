"""`steps`: what is known of every step, as one list; and where the steps of a manager are."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckpt
import ckpt.sync
from ckpt import errors
from ckpt.storage import Memory
from tests.behaviour.opening.damaged_roots import flip_rest

STATE = {"w": np.arange(4.0)}


def test_the_list_says_of_each_step_what_its_metadata_say(tmp_path: Path) -> None:
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(tmp_path, options=options) as old:
        old.save(1, args=ocp.args.StandardSave(STATE), metrics={"loss": 0.5})
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(2, STATE, metrics={"loss": 0.25}, custom_metadata={"note": "x"}, durable=True)
        found = mgr.steps()
        assert found == [mgr.metadata(step).info for step in (1, 2)]
        assert [each.metrics for each in found] == [{"loss": 0.5}, {"loss": 0.25}]


def test_it_has_the_steps_of_all_tiers(tmp_path: Path) -> None:
    async def main() -> None:
        tiers = [ckpt.tiers.Tier(tmp_path / "near")]
        async with ckpt.CheckpointManager(tmp_path / "run", tiers=tiers) as mgr:
            assert await mgr.steps() == []
            commit = await mgr.save(1, STATE)
            await commit.in_root
            (info,) = await mgr.steps()
            assert info.tiers == (str(tmp_path / "near"), str(tmp_path / "run"))

    asyncio.run(main())


def test_a_step_that_goes_meanwhile_is_not_in_it_and_the_one_after_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a manager does that keeps one step: there is a step all the time."""
    keep = ckpt.keep.Latest(1)
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, STATE, durable=True)
        reader = mgr._service.reader
        read = reader.metadata

        async def late(step: int | None) -> Any:
            if step == 1:
                async with ckpt.CheckpointManager(tmp_path, keep=keep) as other:
                    await other.save(2, STATE)
            return await read(step)

        monkeypatch.setattr(reader, "metadata", late)
        assert [info.step for info in mgr.steps()] == [2]


def test_a_step_whose_manifest_is_damaged_is_named_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        for step in (1, 2):
            mgr.save(step, STATE, durable=True)
        flip_rest(tmp_path / "2")
        assert [info.step for info in mgr.steps()] == [1]
    (said,) = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert "step 2 is left out of the list" in said


def test_the_directory_is_a_path_and_that_of_a_store_its_url(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        mgr.save(3, STATE, durable=True)
        assert isinstance(mgr.directory, Path)
        assert (mgr.directory / "3" / "ckpt.json").exists()
        assert not hasattr(mgr, "root")
    with ckpt.sync.CheckpointManager(Memory("memory://run")) as mgr:
        assert mgr.directory == "memory://run"


def test_a_run_without_metrics_has_no_best_step(tmp_path: Path) -> None:
    ranking = ckpt.keep.Best(1, "loss", "min")
    for preservation in (None, ranking):
        root = tmp_path / f"{preservation is None}"
        with ckpt.sync.CheckpointManager(root, keep=preservation) as mgr:
            assert mgr.best_step() is None
            mgr.save(1, STATE, durable=True)
            assert mgr.best_step() is None
            with pytest.raises(errors.InvalidArgumentError, match="only step does not have"):
                mgr.best_step("loss", "min")
            mgr.save(2, STATE, metrics={"accuracy": 1.0}, durable=True)
            with pytest.raises(errors.InvalidArgumentError, match=r"best_step\("):
                mgr.best_step()
