"""What a root says of itself, its permissions, and whether it is made."""

from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckpt
import ckpt.sync
from ckpt import errors


def plain(root: Path, **settings: Any) -> ckpt.sync.CheckpointManager:
    return ckpt.sync.CheckpointManager(root, **settings)


def test_the_first_metadata_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with plain(tmp_path, metadata={"run": "a", "lr": 0.1}) as mgr:
        assert mgr.root_metadata() == {"run": "a", "lr": 0.1}
    with caplog.at_level(logging.WARNING, "ckpt"):
        with plain(tmp_path, metadata={"run": "a", "lr": 0.1}):
            pass
        assert not caplog.messages
        with plain(tmp_path, metadata={"run": "a", "lr": 0.2, "new": 1}) as mgr:
            assert mgr.root_metadata() == {"run": "a", "lr": 0.1}
    (line,) = caplog.messages
    assert "lr, new" in line
    with plain(tmp_path, read_only=True) as mgr:
        assert mgr.root_metadata() == {"run": "a", "lr": 0.1}


def test_a_root_without_metadata_takes_the_first_that_come(tmp_path: Path) -> None:
    with plain(tmp_path) as mgr:
        assert mgr.root_metadata() == {}
    with plain(tmp_path, metadata={"run": 1}) as mgr:
        assert mgr.root_metadata() == {"run": 1}
    with plain(tmp_path) as mgr:
        assert mgr.root_metadata() == {"run": 1}


def test_orbax_reads_the_metadata_of_the_root_and_we_read_its(tmp_path: Path) -> None:
    with plain(tmp_path / "ours", metadata={"run": "a"}) as mgr:
        mgr.save(1, {"w": np.ones(3)}).result()
    with ocp.CheckpointManager(tmp_path / "ours") as theirs:
        assert theirs.metadata().custom_metadata == {"run": "a"}
    with ocp.CheckpointManager(tmp_path / "theirs", metadata={"run": "b"}) as theirs:
        theirs.wait_until_finished()
    with plain(tmp_path / "theirs") as mgr:
        assert mgr.root_metadata() == {"run": "b"}


@pytest.mark.parametrize("metadata", [3, "run", ["a"], {"x": object()}, {"x": float("nan")}])
def test_metadata_that_are_no_json_are_refused(tmp_path: Path, metadata: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="metadata"):
        plain(tmp_path / "root", metadata=metadata)
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"custom_metadata": 3}'])
def test_damaged_metadata_of_the_root_stop_no_step(tmp_path: Path, content: str) -> None:
    with plain(tmp_path) as mgr:
        mgr.save(1, {"n": 1}).result()
    (tmp_path / "metadata" / "_ROOT_METADATA").write_text(content)
    with plain(tmp_path) as mgr:
        mgr.save(2, {"n": 2}).result()
        assert mgr.restore() == {"n": 2}
        with pytest.raises(errors.CorruptCheckpointError, match="_ROOT_METADATA"):
            mgr.root_metadata()


def test_a_root_that_is_not_to_be_made_has_to_be_there(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "a"
    with pytest.raises(errors.StorageError, match="create=False"), plain(root, create=False):
        pass
    mgr = plain(root, create=False)
    with pytest.raises(errors.StorageError, match="create=False"):
        mgr.save(1, {"n": 1})
    mgr.close()
    assert not root.parent.exists()
    root.mkdir(parents=True)
    with plain(root, create=False) as mgr:
        assert mgr.save(1, {"n": 1}).result()


@pytest.mark.parametrize(("mode", "umask"), [(0o750, 0o022), (0o700, 0o000), (0o2775, 0o077)])
def test_directories_and_files_get_the_permissions_asked_for(
    tmp_path: Path, mode: int, umask: int
) -> None:
    root = tmp_path / "runs" / "a"
    before = os.umask(umask)
    try:
        with plain(root, permission_mode=mode) as mgr:
            mgr.save(1, {"w": np.ones(300_000), "n": 1}).result()
    finally:
        os.umask(before)
    made = [root.parent, root, root / "1", *(root / "1").rglob("*")]
    assert len(made) > 10
    for path in made:
        wanted = mode if path.is_dir() else mode & 0o666
        assert oct(stat.S_IMODE(path.stat().st_mode)) == oct(wanted), path
    assert json.loads((root / "1" / "ckpt.json").read_bytes())["step"] == 1


@pytest.mark.parametrize("mode", [0o077, 0o600, -1, 0o10700, "0o750", 7.0, True])
def test_permissions_that_cannot_be_meant_are_refused(tmp_path: Path, mode: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="permission_mode"):
        plain(tmp_path, permission_mode=mode)
