"""`FaultyFiles`: sees every file operation, does to it what the plan says, and leaves no trace."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ckpt.storage._local import posix
from tests.support.faults import (
    SYNCS,
    Crash,
    Effect,
    Fail,
    FaultyFiles,
    FileOperation,
    Short,
    Wait,
    at,
    every,
    first_of,
    interception,
    named,
    refused_by,
    since,
)


def everything(top: Path) -> None:
    """Use every function that is watched, below `top` only."""
    inner = top / "inner"
    os.makedirs(inner, exist_ok=True)
    fd = os.open(inner / "a", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.posix_fallocate(fd, 0, 8)
    os.write(fd, b"0123")
    os.pwrite(fd, b"45", 4)
    os.writev(fd, [b"zz", b"zz"])
    os.pwritev(fd, [b"6", b"7"], 6)
    os.ftruncate(fd, 8)
    os.fsync(fd)
    os.fdatasync(fd)
    os.fstat(fd)
    os.utime(fd)
    buffer = bytearray(2)
    assert os.pread(fd, 4, 2) == b"23zz"
    assert os.preadv(fd, [buffer], 6) == 2
    assert buffer == b"67"
    os.lseek(fd, 0, os.SEEK_SET)
    assert os.read(fd, 2) + bytes(buffer[: os.readv(fd, [buffer])]) == b"0123"
    os.close(fd)
    os.truncate(inner / "a", 6)
    os.chmod(inner / "a", 0o644)
    os.link(inner / "a", inner / "b")
    os.symlink("a", inner / "c")
    os.rename(inner / "b", inner / "d")
    os.replace(inner / "d", inner / "e")
    assert posix.renameat2(inner / "e", inner / "f", 1) == 0
    assert posix.renameat2(inner / "f", inner / "a", 1) == errno.EEXIST
    assert sorted(os.listdir(inner)) == ["a", "c", "f"]
    with os.scandir(inner) as found:
        assert len(list(found)) == 3
    os.stat(inner / "a")
    os.lstat(inner / "c")
    with open(inner / "g", "wb") as file:
        file.write(b"some bytes")
    assert (inner / "g").read_bytes() == b"some bytes"
    os.unlink(inner / "c")
    os.remove(inner / "g")
    os.mkdir(inner / "h")
    os.rmdir(inner / "h")
    shutil.rmtree(inner)


NAMES = {
    *("chmod", "fdatasync", "flock", "fstat", "fsync", "ftruncate", "link", "listdir", "lstat"),
    *("mkdir", "open", "posix_fallocate", "pread", "preadv", "pwrite", "pwritev", "read", "readv"),
    *("remove", "rename", "renameat2", "replace", "rmdir", "scandir", "stat", "symlink"),
    *("truncate", "unlink", "utime", "write", "writev"),
}


def replaceable() -> list[tuple[Any, str]]:
    names = [(owner, name) for owner, name, _ in interception._places()]
    assert len(names) >= 33
    return names


def attributes() -> list[object]:
    return [getattr(owner, name) for owner, name in replaceable()]


def test_every_operation_is_seen_in_order(tmp_path: Path) -> None:
    with FaultyFiles(tmp_path) as files:
        everything(tmp_path)
    assert {each.name for each in files.operations} == NAMES
    assert [each.number for each in files.operations] == list(range(1, 1 + len(files.operations)))
    assert all(each.ended is not None and each.ended > each.began for each in files.operations)
    assert files.met == []
    failed = [each for each in files.operations if each.error is not None]
    assert [(each.name, each.target) for each in failed] == [("renameat2", "inner/a")]


def test_what_was_written_and_where_is_noted(tmp_path: Path) -> None:
    with FaultyFiles(tmp_path) as files:
        everything(tmp_path)
    writes = [each for each in files.operations if each.data is not None]
    noted = [(each.path, each.offset, each.data) for each in writes]
    assert noted == [
        ("inner/a", 0, b"0123"),
        ("inner/a", 4, b"45"),
        ("inner/a", 4, b"zzzz"),
        ("inner/a", 6, b"67"),
        ("inner/g", 0, b"some bytes"),
    ]


def test_what_lies_elsewhere_is_not_seen(tmp_path: Path) -> None:
    (tmp_path / "watched").mkdir()
    with FaultyFiles(tmp_path / "watched", every(1, Fail(errno.EIO))) as files:
        everything(tmp_path / "watched-not")
        everything(tmp_path)
        assert Path(os.devnull).read_text() == ""
    assert files.operations == []


def test_names_are_followed_through_renames_links_and_other_ways_to_write_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    (real / "sub").mkdir(parents=True)
    link.symlink_to(real)
    monkeypatch.chdir(real)
    with FaultyFiles(link) as files:
        directory = os.open(link, os.O_RDONLY)
        fd = os.open("x", os.O_WRONLY | os.O_CREAT, dir_fd=directory)
        os.rename(real / "x", link / "y")
        os.write(fd, b"1")
        os.stat("y")
        os.stat(os.fsencode(real / "sub" / ".." / "y"))
        os.unlink("y", dir_fd=directory)
        os.write(fd, b"2")
        os.close(fd)
        os.close(directory)
    noted = [(each.name, each.path, each.target) for each in files.operations]
    assert noted == [
        ("open", ".", None),
        ("open", "x", None),
        ("rename", "x", "y"),
        ("write", "y", None),
        ("stat", "y", None),
        ("stat", "y", None),
        ("unlink", "y", None),
        ("write", "y (deleted)", None),
    ]


def test_a_rename_out_of_the_directory_is_seen(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x").touch()
    with FaultyFiles(tmp_path / "in") as files:
        os.rename(tmp_path / "in" / "x", tmp_path / "x")
        os.rename(tmp_path / "x", tmp_path / "in" / "y")
    noted = [(each.path, each.target) for each in files.operations]
    assert noted == [("x", str(tmp_path / "x")), (str(tmp_path / "x"), "y")]


def test_each_operation_fails_alone_and_the_next_run_is_well(tmp_path: Path) -> None:
    before = attributes()
    for number in itertools.count(1):
        top = tmp_path / str(number)
        with FaultyFiles(top, at(number, Fail(errno.EDQUOT))) as files:
            try:
                everything(top)
            except (OSError, AssertionError) as error:
                raised: BaseException | None = error
            else:
                raised = None
        assert attributes() == before
        if not files.met:
            break
        [met] = files.met
        assert (met.number, met.error is not None) == (number, True)
        assert met.error is not None
        assert met.error.errno == errno.EDQUOT
        assert len(files.operations) >= number
        if isinstance(raised, OSError) and met.fd is None:
            assert str(top) in str(raised) or "E" not in str(raised)
        shutil.rmtree(top, ignore_errors=True)
    assert number > len(NAMES)
    assert raised is None


@pytest.mark.parametrize("failing", [False, True])
def test_the_functions_are_put_back_however_it_ends(tmp_path: Path, failing: bool) -> None:
    before = attributes()
    with contextlib.suppress(ZeroDivisionError), FaultyFiles(tmp_path), FaultyFiles(tmp_path):
        assert not set(map(id, before)) & set(map(id, attributes()))
        if failing:
            raise ZeroDivisionError
    assert attributes() == before


def test_nothing_is_changed_after_a_crash(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"old")
    for number in range(1, 9):
        with FaultyFiles(tmp_path, at(number, Crash())) as files:
            for step in range(4):
                for act in (
                    lambda step=step: (tmp_path / f"{step}").write_bytes(b"new"),
                    lambda: os.unlink(tmp_path / "old"),
                ):
                    with contextlib.suppress(OSError):
                        act()
            assert files.crashed
            with pytest.raises(OSError, match="Input/output error"):
                os.stat(tmp_path)
        done = [each for each in files.operations if each.effect is None]
        assert [each.number for each in done] == list(range(1, number))
        # open, write, unlink, then open and write of the next.
        assert (tmp_path / "0").exists() == (number > 1)
        assert (tmp_path / "old").exists() == (number <= 3)
        for path in tmp_path.iterdir():
            path.unlink()
        (tmp_path / "old").write_bytes(b"old")


def test_an_error_lasts_or_passes(tmp_path: Path) -> None:
    def failures(plan: Callable[[FileOperation], Effect | None]) -> list[int]:
        failed = []
        filenames = {str(tmp_path)}
        with FaultyFiles(tmp_path, plan):
            for number in range(1, 7):
                try:
                    os.stat(tmp_path)
                except PermissionError as error:
                    failed.append(number)
                    filenames.add(error.filename)
        assert filenames == {str(tmp_path)}
        return failed

    fail = Fail(errno.EACCES)
    assert failures(at(3, fail)) == [3]
    assert failures(since(4, fail)) == [4, 5, 6]
    assert failures(every(2, fail)) == [2, 4, 6]
    assert failures(at(1, fail, named("mkdir"))) == []
    assert failures(first_of(at(1, fail), at(2, Fail(errno.EACCES)), since(6, fail))) == [1, 2, 6]


@pytest.mark.parametrize("name", ["write", "pwrite", "writev", "pwritev"])
@pytest.mark.parametrize(("nbytes", "moved"), [(None, 4), (1, 1), (5, 5), (100, 8), (0, 1)])
def test_a_short_write_writes_what_it_says(
    tmp_path: Path, name: str, nbytes: int | None, moved: int
) -> None:
    calls: dict[str, Callable[[int], int]] = {
        "write": lambda fd: os.write(fd, b"01234567"),
        "pwrite": lambda fd: os.pwrite(fd, b"01234567", 0),
        "writev": lambda fd: os.writev(fd, [b"012", b"34567"]),
        "pwritev": lambda fd: os.pwritev(fd, [b"012", b"34567"], 0),
    }
    fd = os.open(tmp_path / "x", os.O_WRONLY | os.O_CREAT)
    with FaultyFiles(tmp_path, at(1, Short(nbytes))) as files:
        assert calls[name](fd) == moved
    os.close(fd)
    assert (tmp_path / "x").read_bytes() == b"01234567"[:moved] == files.operations[0].data


@pytest.mark.parametrize("name", ["read", "pread", "readv", "preadv"])
def test_a_short_read_reads_less(tmp_path: Path, name: str) -> None:
    (tmp_path / "x").write_bytes(b"01234567")
    buffer = bytearray(8)
    calls: dict[str, Callable[[int], Any]] = {
        "read": lambda fd: os.read(fd, 8),
        "pread": lambda fd: os.pread(fd, 8, 0),
        "readv": lambda fd: bytes(buffer[: os.readv(fd, [buffer])]),
        "preadv": lambda fd: bytes(buffer[: os.preadv(fd, [buffer], 0)]),
    }
    fd = os.open(tmp_path / "x", os.O_RDONLY)
    with FaultyFiles(tmp_path, every(1, Short(3))):
        assert calls[name](fd) == b"012"
        assert (tmp_path / "x").read_bytes() == b"01234567"
    os.close(fd)


def test_a_file_is_read_and_written_as_ever(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with FaultyFiles(tmp_path):
        with open(path, "w", encoding="utf-8", newline="\r\n") as file:
            assert file.write("größe\nb") == 7
        assert path.read_bytes() == "größe\r\nb".encode()
        assert path.read_text(encoding="utf-8") == "größe\nb"
        with open(path, "ab") as binary:
            binary.write(b"!")
        with open(path, "r+b") as both:
            both.seek(1)
            both.write(b"R")
            both.seek(0)
            assert both.read(2) == b"gR"
            assert both.readline().endswith(b"\n")
            both.truncate(3)
        with open(path, "rb", buffering=0) as raw:
            assert raw.read(2) + raw.read() == b"gR\xc3"
        fd = os.open(path, os.O_RDONLY)
        with open(fd, "rb", closefd=False) as again:
            assert again.read(100) == b"gR\xc3"
        os.close(fd)
        with pytest.raises(FileExistsError):
            path.open("x")


def test_an_operation_waits_at_a_gate_and_others_go_on(tmp_path: Path) -> None:
    gate, arrived = threading.Event(), threading.Event()

    def plan(operation: FileOperation) -> Effect | None:
        if operation.path == "slow":
            arrived.set()
            return Wait(gate, Fail(errno.EIO))
        return None

    with FaultyFiles(tmp_path, plan) as files, ThreadPoolExecutor(1) as one:
        slow = one.submit(os.mkdir, tmp_path / "slow")
        assert arrived.wait(60)
        os.mkdir(tmp_path / "quick")
        assert not slow.done()
        gate.set()
        with pytest.raises(OSError, match="Input/output error"):
            slow.result(60)
    first, second = files.operations
    assert (first.path, second.path) == ("slow", "quick")
    assert first.ended is not None
    assert second.ended is not None
    assert second.ended < first.ended, "the times are not those of the effects"


def test_a_gate_that_nobody_opens_is_told(tmp_path: Path) -> None:
    for gate in (threading.Event(), threading.Barrier(2)):
        plan = every(1, Wait(gate, seconds=0.01))
        with FaultyFiles(tmp_path, plan), pytest.raises(RuntimeError, match="not opened"):
            os.mkdir(tmp_path / "x")


def test_threads_are_counted_together(tmp_path: Path) -> None:
    def work(number: int) -> int:
        failed = 0
        for step in range(50):
            path = tmp_path / f"{number}-{step}"
            try:
                os.mkdir(path)
            except OSError:
                failed += 1
        return failed

    with FaultyFiles(tmp_path, every(10, Fail(errno.EIO))) as files, ThreadPoolExecutor(8) as many:
        assert sum(many.map(work, range(8))) == 40
    assert len(files.operations) == 400
    assert len({each.number for each in files.operations}) == 400
    assert len(list(tmp_path.iterdir())) == 360


def test_without_sync_the_disk_is_left_in_peace_and_the_plan_is_not(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "x", os.O_WRONLY | os.O_CREAT)
    plan = at(2, Fail(errno.EIO))
    with FaultyFiles(tmp_path) as outer, FaultyFiles(tmp_path, plan, sync=False) as files:
        os.fsync(fd)
        with pytest.raises(OSError, match="Input/output error"):
            os.fdatasync(fd)
    os.close(fd)
    assert not any(each.name in SYNCS for each in outer.operations)
    assert [each.error is not None for each in files.operations] == [False, True]


def test_errors_meet_what_they_meet_on_real_systems() -> None:
    create = FileOperation("open", "x", flags=os.O_CREAT | os.O_WRONLY)
    look = FileOperation("open", "x", flags=os.O_RDONLY)
    table = {
        errno.ENOSPC: [create, FileOperation("pwrite", "x"), FileOperation("fsync", "x")],
        errno.EROFS: [create, FileOperation("pwrite", "x"), FileOperation("unlink", "x")],
        errno.EMFILE: [create, look],
        errno.EACCES: [create, look, FileOperation("unlink", "x")],
    }
    every_one = [
        create,
        look,
        *(FileOperation(n, "x") for n in ("pwrite", "fsync", "unlink", "read")),
    ]
    for code, wanted in table.items():
        found = [(each.name, each.flags) for each in every_one if refused_by(code)(each)]
        assert sorted(found) == sorted((each.name, each.flags) for each in wanted)
    assert all(map(refused_by(errno.EIO), every_one))
