"""What a file system refuses is told by its own name."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import ckpt
import ckpt.sync
from ckpt.errors import StorageError
from tests.support.faults import Fail, FaultyFiles, every

STATE = {"n": 1}


def refusing(root: Path, path: str, code: int) -> FaultyFiles:
    """Refuse to sync a directory below `root`."""
    return FaultyFiles(root, every(1, Fail(code), lambda o: o.name == "fsync" and o.path == path))


@pytest.mark.parametrize("is_new", [True, False])
def test_a_directory_above_the_root_that_is_not_synced_is_named(
    is_new: bool, tmp_path: Path
) -> None:
    root = tmp_path / "a" / "b"
    (root.parent if is_new else root).mkdir(parents=True)
    with refusing(tmp_path, "a", errno.EIO), pytest.raises(StorageError) as caught:
        ckpt.sync.CheckpointManager(root).save(0, STATE).result()
    assert caught.value.errno == errno.EIO
    assert str(caught.value).endswith(
        f"cannot sync the directories that hold {root}: fsync of the directory {root.parent} was "
        "refused: Input/output error"
    )


@pytest.mark.parametrize("folder", [".", "metadata"])
def test_a_directory_of_the_root_that_is_not_synced_is_named(folder: str, tmp_path: Path) -> None:
    where = os.path.normpath(tmp_path / folder)
    with refusing(tmp_path, folder, errno.EIO), pytest.raises(StorageError) as caught:
        ckpt.sync.CheckpointManager(tmp_path, custom_metadata={"a": 1}).save(0, STATE).result()
    assert f"fsync of the directory {where} was refused: Input/output error" in str(caught.value)


def test_a_file_system_that_cannot_sync_directories_is_called_unfit(tmp_path: Path) -> None:
    with refusing(tmp_path, ".", errno.EINVAL), pytest.raises(StorageError) as caught:
        ckpt.sync.save(tmp_path / "one", STATE)
    assert str(caught.value) == (
        f"cannot publish {tmp_path}/one: fsync of the directory {tmp_path} was refused: Invalid "
        "argument. On this file system no step would survive a power cut; use another one"
    )
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize("name", ["n" * 196, "ä" * 98, "n" * 255, "n" * 300], ids=len)
def test_a_name_that_is_too_long_is_refused_with_the_longest_possible(
    name: str, tmp_path: Path
) -> None:
    nbytes = len(os.fsencode(name))
    with pytest.raises(StorageError) as caught:
        ckpt.sync.save(tmp_path / name, STATE)
    assert caught.value.errno == errno.ENAMETOOLONG
    assert str(caught.value).endswith(
        f"the name of the checkpoint is too long: it has {nbytes} bytes, and at most 195 are "
        "possible, because the library adds 60 while the checkpoint is written. Choose a shorter "
        "name"
    )
    assert os.listdir(tmp_path) == []
    ckpt.sync.save(tmp_path / "n".ljust(195, "n"), STATE)


def test_the_longest_name_is_that_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On eCryptfs names have at most 143 bytes."""
    monkeypatch.setattr(os, "pathconf", lambda *_: 143)
    ckpt.sync.save(tmp_path / ("n" * 83), STATE)
    with pytest.raises(StorageError, match="it has 84 bytes, and at most 83 are possible"):
        ckpt.sync.save(tmp_path / ("n" * 84), STATE)
