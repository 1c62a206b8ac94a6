"""A root that is removed or unmounted under a manager is not made anew without its steps."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt.errors import StepNotFoundError, StorageError
from tests.support.conditions import until
from tests.support.power import small_memory_disk

SMALL = {"w": np.arange(8.0)}


def test_a_root_that_was_removed_is_not_made_anew(tmp_path: Path) -> None:
    root = tmp_path / "run"
    mgr = ckpt.sync.CheckpointManager(root)
    for step in range(3):
        mgr.save(step, SMALL, durable=True)
    root.rename(tmp_path / "elsewhere")
    for call in (
        lambda: mgr.save(3, SMALL, durable=True),
        lambda: mgr.all_steps(),
        lambda: mgr.restore(),
        lambda: mgr.resume(SMALL),
    ):
        with pytest.raises(StorageError, match="removed or unmounted") as caught:
            call()
        assert str(root) in str(caught.value)
    assert not root.exists()
    (tmp_path / "elsewhere").rename(root)
    mgr.save(3, SMALL, durable=True)
    assert mgr.all_steps() == [0, 1, 2, 3]
    mgr.close()


def test_a_root_that_was_removed_before_its_first_step_is_not_made_anew(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(StorageError, match="removed or unmounted"):
            mgr.save(0, SMALL, durable=True)
    assert not (tmp_path / "run").exists()
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        mgr.save(0, SMALL, durable=True)


def test_nothing_is_written_where_a_root_was_mounted(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can mount a file system")
    with small_memory_disk(tmp_path, size_bytes=4 << 20) as root:
        mgr = ckpt.sync.CheckpointManager(root)
        mgr.save(0, SMALL, durable=True)
        until(lambda: not mgr.is_saving_in_progress())
        subprocess.run(["umount", "--lazy", root], check=True)
        try:
            with pytest.raises(StorageError, match="removed or unmounted"):
                mgr.save(1, SMALL)
            with pytest.raises((StorageError, StepNotFoundError)):
                mgr.restore()
            assert os.listdir(root) == []
        finally:
            # For the end of the body, which unmounts it.
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", root], check=True)
            mgr.close()
