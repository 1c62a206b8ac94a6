"""Steps moved away instead of removed, and files of others moved out of them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import anyio
import pytest

from ckpt._settings import Timeouts
from ckpt.errors import StorageError
from ckpt.storage import Local
from ckpt.storage._local import posix
from ckpt.storage._local.storage import LocalStorage
from tests.support.faults import Effect, Fail, FaultyFiles, FileOperation

T = TypeVar("T")


def run(work: Callable[[LocalStorage], Awaitable[T]], root: Path, mode: int | None = None) -> T:
    return anyio.run(work, LocalStorage(Local(root, permission_mode=mode), Timeouts()))


def move(root: Path, step_dir: str, trash: str = "trash") -> str | None:
    return run(lambda storage: storage.move(step_dir, trash), root)


def set_aside(root: Path, step_dir: str, *paths: str) -> Path:
    """Write files into a step, each with its path as content, and move them out again."""
    for path in paths:
        file = root / step_dir / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(path)
    return Path(run(lambda storage: storage.set_aside(step_dir, paths), root))


def files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def steps(root: Path, *names: str) -> None:
    for name in names:
        (root / name).mkdir()
        (root / name / "ckpt.json").write_text(name)


def test_a_trash_folder_that_is_gone_is_made_for_the_next_step(tmp_path: Path) -> None:
    steps(tmp_path, "1", "2")
    assert move(tmp_path, "1", "bin/trash") == str(tmp_path / "bin" / "trash" / "1")
    assert files(tmp_path / "bin") == {"trash/1/ckpt.json": "1"}
    (tmp_path / "bin").rename(tmp_path / "elsewhere")
    assert move(tmp_path, "2", "bin/trash") == str(tmp_path / "bin" / "trash" / "2")
    assert files(tmp_path / "bin") == {"trash/2/ckpt.json": "2"}


def test_no_folder_is_made_for_a_step_that_is_not_there(tmp_path: Path) -> None:
    assert move(tmp_path, "1") is None
    assert os.listdir(tmp_path) == []


@pytest.mark.disk
def test_a_folder_of_another_file_system_is_named_and_the_step_stays(tmp_path: Path) -> None:
    if not os.path.isdir("/dev/shm") or os.stat("/dev/shm").st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("there is no second file system")
    trash = Path("/dev/shm") / f"ckpt-test-trash-{os.getpid()}"
    steps(tmp_path, "1")
    try:
        with pytest.raises(StorageError, match=f"{trash}: it is on another file system") as caught:
            move(tmp_path, "1", str(trash))
        assert caught.value.errno == errno.EXDEV
    finally:
        trash.rmdir()
    assert files(tmp_path) == {"1/ckpt.json": "1"}


def test_a_file_in_the_place_of_the_folder_is_named_and_the_step_stays(tmp_path: Path) -> None:
    steps(tmp_path, "1")
    (tmp_path / "trash").write_text("mine")
    with pytest.raises(StorageError, match="trash"):
        move(tmp_path, "1")
    with pytest.raises(StorageError, match="trash"):
        run(lambda storage: storage.prepare_trash("trash"), tmp_path)
    assert files(tmp_path) == {"1/ckpt.json": "1", "trash": "mine"}


def test_files_set_aside_go_to_a_folder_of_their_own_each_time(tmp_path: Path) -> None:
    for content in ("first", "second", "third"):
        (tmp_path / "5" / "plots").mkdir(parents=True, exist_ok=True)
        (tmp_path / "5" / "plots" / "loss.png").write_text(content)
        (tmp_path / "5" / "link").symlink_to(content)
        run(lambda storage: storage.set_aside("5", ["plots/loss.png", "link"]), tmp_path)
    for name, content in {
        "5.others": "first",
        "5.others-1": "second",
        "5.others-2": "third",
    }.items():
        assert files(tmp_path / name) == {"plots/loss.png": content}
        assert os.readlink(tmp_path / name / "link") == content
    assert files(tmp_path / "5") == {}


def test_a_file_that_has_gone_meanwhile_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "x").write_text("x")
    folder = run(lambda storage: storage.set_aside("5", ["gone", "x"]), tmp_path)
    assert files(Path(folder)) == {"x": "x"}


def test_a_file_that_cannot_be_moved_leaves_nothing_behind(tmp_path: Path) -> None:
    def plan(operation: FileOperation) -> Effect | None:
        return Fail(errno.EACCES) if operation.name == "rename" else None

    with FaultyFiles(tmp_path, plan, sync=False), pytest.raises(StorageError, match="5"):
        set_aside(tmp_path, "5", "x")
    assert files(tmp_path) == {"5/x": "x"}


@pytest.mark.parametrize("code", [0, errno.ENOSYS])
def test_directories_are_renamed_as_before_and_never_replace_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    if code:
        monkeypatch.setattr(posix, "renameat2", lambda *_: code)
    steps(tmp_path, "1", "2")
    with pytest.raises(FileExistsError):
        posix.rename_new(tmp_path / "1", tmp_path / "2")
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        posix.rename_new(tmp_path / "1", tmp_path / "file")
    posix.rename_new(tmp_path / "1", tmp_path / "3")
    assert files(tmp_path) == {"2/ckpt.json": "2", "3/ckpt.json": "1", "file": ""}


def test_what_has_the_name_of_the_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "5.others").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "5.others-1").write_text("mine")
    assert set_aside(tmp_path, "5", "a", "b/c").name == "5.others-2"
    assert files(tmp_path) == {
        "5.others-1": "mine",
        "5.others-2/a": "a",
        "5.others-2/b/c": "b/c",
    }


@pytest.mark.parametrize(("mode", "umask"), [(0o700, 0o022), (0o2770, 0o077), (None, 0o027)])
def test_folders_get_the_permissions_asked_for(
    tmp_path: Path, mode: int | None, umask: int
) -> None:
    steps(tmp_path, "1")
    (tmp_path / "1" / "mine").mkdir()
    (tmp_path / "1" / "mine" / "x").touch()
    (tmp_path / "there").mkdir()
    kept = stat.S_IMODE((tmp_path / "there").stat().st_mode)
    before = os.umask(umask)
    try:
        run(lambda storage: storage.set_aside("1", ["mine/x"]), tmp_path, mode)
        run(lambda storage: storage.prepare_trash("there/bin/trash"), tmp_path, mode)
    finally:
        os.umask(before)
    wanted = 0o777 & ~umask if mode is None else mode
    for path in ("1.others", "1.others/mine", "there/bin", "there/bin/trash"):
        assert oct(stat.S_IMODE((tmp_path / path).stat().st_mode)) == oct(wanted), path
    assert stat.S_IMODE((tmp_path / "there").stat().st_mode) == kept


def test_a_new_folder_is_open_to_nobody_else_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = []
    real = os.chmod

    def chmod(path: Path, mode: int) -> None:
        first.append(stat.S_IMODE(path.stat().st_mode))
        real(path, mode)

    monkeypatch.setattr(os, "chmod", chmod)
    assert posix.make_directories(tmp_path / "a" / "b", 0o700) == [
        tmp_path / "a" / "b",
        tmp_path / "a",
    ]
    assert first == [0o700, 0o700]
    assert posix.make_directories(tmp_path / "a" / "b", 0o750) == []
    assert len(first) == 2
    (tmp_path / "a" / "file").touch()
    for path in ("a/file", "a/file/c"):
        with pytest.raises((FileExistsError, NotADirectoryError)):
            posix.make_directories(tmp_path / path, 0o700)
