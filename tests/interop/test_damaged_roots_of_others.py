"""Roots of others that are cut, mixed or half moved: named, read as far as they go, and left alone.

Nothing is written into them before the first save, and no file of theirs is ever deleted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import flax.serialization
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckpt
import ckpt.sync
from tests.support.command import ckpt_command

STEPS = (10, 20, 30)


def state_of(step: int) -> dict[str, Any]:
    return {"w": np.arange(300.0) + step, "step": step}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root of Orbax with metadata of its own; change nothing."""
    root = tmp_path_factory.mktemp("others") / "run"
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(root, options=options, metadata={"run": "theirs"}) as manager:
        for step in STEPS:
            args = ocp.args.StandardSave(state_of(step))
            manager.save(step, args=args, metrics={"loss": 1.0 / step})
    return root


def cut(name: str, keep: int = 3) -> Callable[[Path], None]:
    def do(root: Path) -> None:
        path = root / name
        path.write_bytes(path.read_bytes()[:keep])

    return do


def without(name: str) -> Callable[[Path], None]:
    def do(root: Path) -> None:
        path = root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return do


def with_flax(root: Path) -> None:
    (root / "checkpoint_40").write_bytes(flax.serialization.to_bytes(state_of(40)))


def half_ours(root: Path) -> None:
    """A copy of a step of this library whose manifest has not arrived."""
    ckpt.sync.save(root / "40", state_of(40))
    (root / "40/ckpt.json").unlink()


def in_old_form(root: Path) -> None:
    os.rename(root / "metadata/_ROOT_METADATA", root / "metadata/metadata")
    (root / "metadata/metadata").write_text('{"run": "theirs"}')


def begun(root: Path) -> None:
    os.rename(root / "30", root / f"30{ocp.utils.TMP_DIR_SUFFIX}")


def empty_step(root: Path) -> None:
    (root / "40").mkdir()


def a_file(root: Path) -> None:
    (root / "40").write_text("a file that is named like a step")


# What is done to the root, and what is said of it, if it is seen without reading arrays.
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "metadata of a step cut": (cut("30/_CHECKPOINT_METADATA"), "step 30"),
    "metadata of a step empty": (cut("30/_CHECKPOINT_METADATA", 0), "step 30"),
    "metadata of a step missing": (without("30/_CHECKPOINT_METADATA"), ""),
    "tree cut": (cut("30/default/_METADATA"), ""),
    "tree missing": (without("30/default/_METADATA"), ""),
    "database cut": (cut("30/default/manifest.ocdbt"), ""),
    "database empty": (cut("30/default/manifest.ocdbt", 0), ""),
    "data missing": (without("30/default/d"), ""),
    "item missing": (without("30/default"), ""),
    "metrics cut": (cut("30/metrics/metrics"), ""),
    "root metadata cut": (cut("metadata/_ROOT_METADATA"), ""),
    "root metadata in the old form": (in_old_form, ""),
    "begun": (begun, "30.orbax-checkpoint-tmp"),
    "mixed with flax": (with_flax, ""),
    "half of a step of ours": (half_ours, "step 40"),
    "an empty directory": (empty_step, "40"),
    "a file": (a_file, ""),
}


def error_of(call: Callable[[], object]) -> ckpt.CheckpointError | None:
    try:
        call()
    except ckpt.CheckpointError as error:
        return error
    return None


def files_of(root: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
    }


@pytest.mark.parametrize("damage", DAMAGES)
def test_it_is_named_and_stays_what_it_was(
    written: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    root = Path(shutil.copytree(written, tmp_path / "run"))
    do, said = DAMAGES[damage]
    do(root)
    before = files_of(root)
    keep = ckpt.keep.Latest(1)
    with ckpt.sync.CheckpointManager(root, keep=keep, custom_metadata={"run": "ours"}) as mgr:
        steps = mgr.all_steps()
        assert steps[:2] == [10, 20]
        assert mgr.metadata(20).info.metrics == {"loss": 0.05}
        assert mgr.best_step("loss", "min") in (20, 30)
        for step in (10, 20):
            assert np.array_equal(mgr.restore(step)["w"], state_of(step)["w"])
        # A step that is listed is whole, or its error says what is wrong.
        for step in steps[2:]:
            error = error_of(partial(mgr.restore, step))
            assert error is None or (error.step == step and "no such step" not in str(error))
        start, state = mgr.resume(state_of(0))
        assert start in (21, 31)
        assert np.array_equal(state["w"], state_of(start - 1)["w"])
        with contextlib.suppress(ckpt.CheckpointError):
            assert mgr.root_metadata()["run"] == "theirs"
        mgr.steps()
        assert files_of(root) == before
        warnings = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
        assert not said or any(said in text for text in warnings)
        if start == 21 and 30 in steps:
            assert any("30" in text for text in warnings)
        mgr.save(50, state, durable=True)
        mgr.wait_until_finished()
    after = files_of(root)
    assert before.items() <= after.items()
    for path in (root, *root.rglob("*")):
        os.utime(path, (time.time() - 10**6,) * 2)
    assert ckpt_command("gc", root).status == 0
    assert before.items() <= files_of(root).items()
    with ckpt.sync.CheckpointManager(root) as mgr:
        assert mgr.latest_step() == 50
