"""The step that the tests of `verify` damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ckpt
import ckpt.sync
from tests.behaviour.verifying.verified_step import FORMATS, ITEMS, STEP


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a run with one step, whose data lies in many files."""
    root = tmp_path_factory.mktemp("verify") / "run"
    staging = ckpt.Staging(budget_bytes=1 << 20)
    with ckpt.sync.CheckpointManager(root, staging=staging, formats=FORMATS) as mgr:
        mgr.save(STEP, items=ITEMS, metrics={"loss": 0.5}).result()
    return root


@pytest.fixture
def root(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


@pytest.fixture
def step(root: Path) -> Path:
    return root / str(STEP)
