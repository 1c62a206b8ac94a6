"""`ckpt.orbax.NameFormat` on disks: both kinds of steps, under all names that steps may have."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckpt.orbax
import ckpt.sync
from ckpt.step_names import Composite, Standard, StepNames

PADDED = Standard("", 4)
BOTH = Composite(Standard("ckpt", 8), PADDED)


def state(step: int) -> dict[str, Any]:
    return {"w": jnp.arange(10) + step}


def save(root: Path, names: StepNames, *steps: int) -> None:
    with ckpt.sync.CheckpointManager(root, step_names=names) as mgr:
        for step in steps:
            mgr.save(step, state(step))


def manager(root: Path, names: StepNames | None) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(
        step_name_format=ckpt.orbax.NameFormat(names), enable_async_checkpointing=False
    )
    handler = ocp.StandardCheckpointHandler()
    return ocp.CheckpointManager(root, options=options, item_handlers=handler)


@pytest.mark.parametrize("names", [Standard(), PADDED, Standard("ckpt", 8)])
def test_both_kinds_of_steps_are_found(names: StepNames, tmp_path: Path) -> None:
    save(tmp_path, names, 1, 2)
    with manager(tmp_path, names) as mgr:
        mgr.save(3, args=ocp.args.StandardSave(state(3)))
        assert sorted(mgr.all_steps()) == [1, 2, 3]
        for step in (1, 2, 3):
            assert np.array_equal(mgr.restore(step)["w"], np.arange(10) + step)
    with ckpt.sync.CheckpointManager(tmp_path, step_names=names) as ours:
        assert ours.all_steps() == [1, 2, 3]


def test_a_step_is_found_under_any_of_its_names(tmp_path: Path) -> None:
    save(tmp_path, PADDED, 1, 2)
    save(tmp_path, BOTH, 3)
    with manager(tmp_path, BOTH) as mgr:
        assert sorted(mgr.all_steps()) == [1, 2, 3]
        assert np.array_equal(mgr.restore(1)["w"], np.arange(10) + 1)
    reading = ckpt.orbax.NameFormat(BOTH, reads_from=tmp_path)
    assert [reading.build_name(step) for step in (1, 3, 9)] == [
        "0001",
        "ckpt_00000003",
        "ckpt_00000009",
    ]


def test_what_is_no_step_is_not_found(tmp_path: Path) -> None:
    save(tmp_path, PADDED, 1)
    (tmp_path / "0009").write_text("a file")
    shutil.copytree(tmp_path / "0001", tmp_path / "0007")
    (tmp_path / "0001" / "ckpt.json").rename(tmp_path / "0001" / "ckpt.json.old")
    shutil.copytree(tmp_path / "0007", tmp_path / "0008")
    (tmp_path / "0008" / "ckpt.json").write_bytes(b"{}")
    names = ckpt.orbax.NameFormat(PADDED)
    # Without its manifest, a step of this library is a directory of Orbax.
    assert [each.step for each in names.find_all(tmp_path)] == [1]
    for step in (7, 8, 9, 10):
        with pytest.raises(ValueError, match=f"no committed step {step}"):
            names.find_step(tmp_path, step)
    assert list(names.find_all(tmp_path / "nothing")) == []
