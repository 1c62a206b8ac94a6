"""Notes: small files beside the steps of a root, written whole, aged by the store's clock."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import anyio
import pytest

import ckpt.sync
from ckpt._settings import Timeouts
from ckpt.errors import CorruptCheckpointError, InvalidArgumentError, StorageError
from ckpt.storage import Local
from ckpt.storage._local import posix
from ckpt.storage._local.leases import sweep_root
from ckpt.storage._local.storage import LocalStorage
from tests.support.crash_states import crash_states, read_tree
from tests.support.faults import Crash, Fail, FaultyFiles, at, every, named

T = TypeVar("T")


def run(work: Callable[[LocalStorage], Awaitable[T]], root: Path) -> T:
    return anyio.run(work, LocalStorage(root, Timeouts()))


def put(root: Path, name: str, data: bytes, *, replace: bool = False, durable: bool = True) -> bool:
    async def work(storage: LocalStorage) -> bool:
        return await storage.put_note(name, data, replace=replace, durable=durable)

    return run(work, root)


def read(root: Path, name: str) -> bytes | None:
    return run(lambda storage: storage.read("", name, 100), root)


def ages(root: Path, folder: str) -> dict[str, float]:
    return run(lambda storage: storage.notes(folder), root)


def drop(root: Path, name: str, *, durable: bool = True) -> bool:
    async def work(storage: LocalStorage) -> bool:
        return await storage.drop_note(name, durable=durable)

    return run(work, root)


def touch(root: Path, name: str) -> bool:
    return run(lambda storage: storage.touch_note(name), root)


def names(root: Path) -> list[str]:
    return sorted(os.listdir(root))


def test_a_note_is_written_read_listed_and_removed(tmp_path: Path) -> None:
    assert read(tmp_path, "metadata/x") is None
    assert ages(tmp_path, "metadata") == {}
    assert not drop(tmp_path, "metadata/x")
    assert not touch(tmp_path, "metadata/x")
    assert put(tmp_path, "metadata/x", b"one")
    assert put(tmp_path, "metadata/y", b"two")
    assert read(tmp_path, "metadata/x") == b"one"
    assert sorted(ages(tmp_path, "metadata")) == ["x", "y"]
    assert drop(tmp_path, "metadata/x")
    assert read(tmp_path, "metadata/x") is None
    assert sorted(ages(tmp_path, "metadata")) == ["y"]
    assert names(tmp_path) == ["metadata"]


@pytest.mark.parametrize("durable", [True, False])
def test_a_note_is_not_replaced_unless_it_is_to_be(tmp_path: Path, durable: bool) -> None:
    assert put(tmp_path, "a/x", b"one", durable=durable)
    assert not put(tmp_path, "a/x", b"two", durable=durable)
    assert read(tmp_path, "a/x") == b"one"
    assert put(tmp_path, "a/x", b"two", durable=durable, replace=True)
    assert read(tmp_path, "a/x") == b"two"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize(("mode", "umask"), [(0o770, 0o077), (0o700, 0o022), (None, 0o027)])
@pytest.mark.parametrize("durable", [True, False])
def test_notes_and_their_folder_get_the_permissions_asked_for(
    tmp_path: Path, mode: int | None, umask: int, durable: bool
) -> None:
    async def work(storage: LocalStorage) -> bool:
        return await storage.put_note("a/x", b"", replace=False, durable=durable)

    before = os.umask(umask)
    try:
        assert anyio.run(work, LocalStorage(Local(tmp_path, permission_mode=mode), Timeouts()))
    finally:
        os.umask(before)
    wanted = 0o777 & ~umask if mode is None else mode
    assert oct((tmp_path / "a").stat().st_mode & 0o7777) == oct(wanted)
    assert oct((tmp_path / "a" / "x").stat().st_mode & 0o7777) == oct(wanted & 0o666)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS])
def test_without_a_rename_that_refuses_to_replace_nothing_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """As on NFS, which has links instead."""
    monkeypatch.setattr(posix, "renameat2", lambda *_: code)
    assert put(tmp_path, "a/x", b"one")
    assert not put(tmp_path, "a/x", b"two")
    assert read(tmp_path, "a/x") == b"one"
    assert names(tmp_path) == ["a"]
    assert names(tmp_path / "a") == ["x"]


@pytest.fixture
def only_plain_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on exFAT and some network file systems."""
    monkeypatch.setattr(posix, "renameat2", lambda *_: errno.EINVAL)
    with FaultyFiles(tmp_path, every(1, Fail(errno.EPERM), named("link"))):
        yield


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
def test_without_links_nothing_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(posix, "renameat2", lambda *_: errno.EINVAL)
    with FaultyFiles(tmp_path, every(1, Fail(code), named("link"))) as files:
        assert put(tmp_path, "a/x", b"one")
        assert not put(tmp_path, "a/x", b"two")
        assert put(tmp_path, "a/x", b"three", replace=True)
    assert len(files.met) == 2
    assert read(tmp_path, "a/x") == b"three"
    assert names(tmp_path) == ["a"]
    assert names(tmp_path / "a") == ["x"]


def test_another_error_of_a_link_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posix, "renameat2", lambda *_: errno.EINVAL)
    with (
        FaultyFiles(tmp_path, every(1, Fail(errno.ENOSPC), named("link"))),
        pytest.raises(StorageError, match="No space left"),
    ):
        put(tmp_path, "a/x", b"one")
    assert names(tmp_path) in ([], ["a"])


@pytest.mark.usefixtures("only_plain_renames")
def test_a_root_without_links_is_used_like_any_other(tmp_path: Path) -> None:
    for turn in range(2):
        with ckpt.sync.CheckpointManager(tmp_path, custom_metadata={"run": 7}) as mgr:
            mgr.save(turn, {"n": turn}).result()
            mgr.pin(turn, "best")
            assert mgr.root_metadata() == {"run": 7}
            assert mgr.restore(turn) == {"n": turn}
    assert names(tmp_path) == [".ckpt-pins", "0", "1", "metadata"]


def write_at_once(root: Path, *, durable: bool) -> None:
    barrier = threading.Barrier(8)

    def write(number: int) -> bool:
        barrier.wait()
        return put(root, "a/x", b"%d" % number, durable=durable)

    with ThreadPoolExecutor(8) as threads:
        won = list(threads.map(write, range(8)))
    assert sum(won) == 1
    assert read(root, "a/x") == b"%d" % won.index(True)


@pytest.mark.parametrize("durable", [True, False])
def test_of_many_that_write_a_note_one_wins(tmp_path: Path, durable: bool) -> None:
    write_at_once(tmp_path, durable=durable)


@pytest.mark.usefixtures("only_plain_renames")
def test_without_links_one_of_many_wins_as_well(tmp_path: Path) -> None:
    for turn in range(10):
        (tmp_path / str(turn)).mkdir()
        write_at_once(tmp_path / str(turn), durable=True)


@pytest.mark.parametrize("durable", [True, False])
def test_a_folder_goes_with_its_last_note_and_nobody_who_writes_minds(
    tmp_path: Path, durable: bool
) -> None:
    def work(number: int) -> None:
        for turn in range(40):
            assert put(tmp_path, f"a/{number}", b"x", durable=durable and not turn % 4)
            assert read(tmp_path, f"a/{number}") == b"x"
            assert drop(tmp_path, f"a/{number}", durable=False)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert names(tmp_path) == []


@pytest.mark.parametrize("call", ["mkdir", "open"])
@pytest.mark.parametrize("durable", [True, False])
def test_a_folder_that_goes_before_it_is_used_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool, call: str
) -> None:
    """Somebody has removed the last other note of it in between."""
    real = getattr(os, call)
    gone: list[Any] = []

    def then_gone(path: Any, *args: Any, **options: Any) -> Any:
        result = real(path, *args, **options)
        if path == tmp_path / "a" and len(gone) < 3:
            gone.append(path)
            os.rmdir(path)
        return result

    monkeypatch.setattr(os, call, then_gone)
    assert put(tmp_path, "a/x", b"one", durable=durable)
    assert len(gone) == 3
    assert read(tmp_path, "a/x") == b"one"
    with pytest.raises(StorageError, match="No such file"):
        put(tmp_path / "missing", "a/x", b"one", durable=durable)


def test_a_folder_with_something_else_in_it_stays(tmp_path: Path) -> None:
    put(tmp_path, "a/x", b"one")
    (tmp_path / "a" / "thesis.txt").touch()
    assert drop(tmp_path, "a/x")
    assert names(tmp_path / "a") == ["thesis.txt"]


def test_ages_are_by_the_clock_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where this machine's own clock is wrong."""
    put(tmp_path, "a/old", b"")
    put(tmp_path, "a/new", b"")
    past = time.time() - 1000
    os.utime(tmp_path / "a" / "old", (past, past))
    monkeypatch.setattr(time, "time", lambda: 0.0)
    found = ages(tmp_path, "a")
    assert 990 < found["old"] < 1100
    assert found["new"] < 60
    assert touch(tmp_path, "a/old")
    assert ages(tmp_path, "a")["old"] < 60
    assert names(tmp_path) == ["a"]


def test_who_may_not_write_can_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "a/x", b"")

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "read-only file system")

    for name in ("mkdir", "utime"):
        monkeypatch.setattr(os, name, refused)
    assert abs(ages(tmp_path, "a")["x"]) < 60
    with pytest.raises(StorageError, match=r"cannot write .*a/y: read-only") as caught:
        put(tmp_path, "a/y", b"", durable=False)
    assert caught.value.errno == errno.EROFS
    with pytest.raises(StorageError, match=r"cannot renew .*a/x"):
        touch(tmp_path, "a/x")


def test_what_is_no_file_is_no_note(tmp_path: Path) -> None:
    (tmp_path / "a" / "directory").mkdir(parents=True)
    os.mkfifo(tmp_path / "a" / "fifo")
    (tmp_path / "a" / "link").symlink_to(__file__)
    (tmp_path / "a" / "x").touch()
    assert sorted(ages(tmp_path, "a")) == ["x"]
    for name in ("fifo", "link"):
        with pytest.raises(CorruptCheckpointError):
            read(tmp_path, f"a/{name}")


def test_no_link_is_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "x").write_bytes(b"mine")
    past = time.time() - 1000
    os.utime(other / "x", (past, past))
    root = tmp_path / "root"
    root.mkdir()
    (root / "a").symlink_to(other)
    calls: list[Callable[[], Any]] = [
        lambda: put(root, "a/y", b"1"),
        lambda: put(root, "a/y", b"1", replace=True),
        lambda: put(root, "a/y", b"1", durable=False),
        lambda: ages(root, "a"),
        lambda: touch(root, "a/x"),
        lambda: drop(root, "a/x"),
    ]
    for call in calls:
        with pytest.raises(StorageError):
            call()
    with pytest.raises(CorruptCheckpointError):
        read(root, "a/x")
    assert names(other) == ["x"]
    # A note that is a link is replaced, touched or removed itself.
    (root / "b").mkdir()
    (root / "b" / "x").symlink_to(other / "x")
    assert not put(root, "b/x", b"1")
    assert not put(root, "b/x", b"1", durable=False)
    assert touch(root, "b/x")
    assert time.time() - (other / "x").stat().st_mtime > 900
    assert put(root, "b/x", b"1", replace=True)
    (root / "b" / "z").symlink_to(other / "x")
    assert drop(root, "b/z")
    assert (other / "x").read_bytes() == b"mine"


@pytest.mark.parametrize(
    "name",
    ["", "x", "/x", "a/", "a/b/c", "../x", "a/..", "./x", "a/.", "a/x\0", "a/x\n", "a /x", "-a/x"],
)
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    calls: list[Callable[[], Any]] = [
        lambda: put(root, name, b"1"),
        lambda: put(root, name, b"1", durable=False),
        lambda: touch(root, name),
        lambda: drop(root, name),
    ]
    for call in calls:
        with pytest.raises(InvalidArgumentError, match="expected a folder and a name in it"):
            call()
    assert names(tmp_path) == ["root"]
    assert names(root) == []


@pytest.mark.parametrize("replace", [True, False])
def test_whoever_dies_while_writing_leaves_the_old_note_or_the_new_one(
    tmp_path: Path, replace: bool
) -> None:
    """And nothing that a sweep does not remove."""
    for number in itertools.count(1):
        root = tmp_path / f"{number}"
        root.mkdir()
        if replace:
            put(root, "a/x", b"old")
        crash = at(number, Crash())
        with (
            FaultyFiles(root, crash, sync=False) as files,
            contextlib.suppress(StorageError),
        ):
            put(root, "a/x", b"new", replace=replace)
        assert read(root, "a/x") in ((b"old", b"new") if replace else (None, b"new"))
        for lease in root.glob(".ckpt-lease-*"):
            # Of one that its writer had not come to write into, only time tells.
            if not lease.stat().st_size:
                os.utime(lease, (0, 0))
        sweep_root(root)
        assert set(names(root)) <= {"a"}
        assert set(names(root / "a") if (root / "a").exists() else ()) <= {"x"}
        if not files.met:
            break
    assert number > 10
    assert read(root, "a/x") == b"new"


@pytest.mark.parametrize("durable", [True, False])
def test_a_write_that_fails_is_told_and_leaves_nothing(tmp_path: Path, durable: bool) -> None:
    for number in itertools.count(1):
        root = tmp_path / f"{number}"
        root.mkdir()
        failed = False
        with FaultyFiles(root, at(number, Fail(errno.ENOSPC)), sync=False) as files:
            try:
                assert put(root, "a/x", b"new", durable=durable)
            except StorageError as error:
                failed = error.errno == errno.ENOSPC
        if not files.met:
            break
        sweep_root(root)
        assert set(names(root)) <= {"a"}
        assert set(names(root / "a") if (root / "a").exists() else ()) <= {"x"}
        assert failed or read(root, "a/x") == b"new"
    assert number > 3


@pytest.mark.parametrize("replace", [True, False])
def test_an_acknowledged_note_outlives_a_power_cut(tmp_path: Path, replace: bool) -> None:
    """Beside it a brief note is made and dropped, of which nothing is ever synced."""
    root = tmp_path / "run" / "root"
    root.mkdir(parents=True)
    if replace:
        put(root, "a/x", b"old")
    before = read_tree(root.parent)
    with FaultyFiles(root.parent, sync=False) as files:
        put(root, "a/y", b"brief", durable=False)
        put(root, "a/x", b"new", replace=replace)
        heard = files.now()
        drop(root, "a/y", durable=False)
    found = set()
    for number, state in enumerate(crash_states(before, files.operations, losses=1)):
        top = tmp_path / f"{number}"
        state.write(top)
        note = read(top / "root", "a/x")
        found.add((note, state.may_follow(heard)))
        shutil.rmtree(top)
    old = b"old" if replace else None
    assert found == {(old, False), (b"new", False), (b"new", True)}


def test_a_note_that_was_dropped_does_not_come_back(tmp_path: Path) -> None:
    root = tmp_path / "run" / "root"
    root.mkdir(parents=True)
    put(root, "a/x", b"old")
    put(root, "a/y", b"other")
    before = read_tree(root.parent)
    with FaultyFiles(root.parent, sync=False) as files:
        drop(root, "a/x")
        heard = files.now()
        drop(root, "a/y")
    found = set()
    for number, state in enumerate(crash_states(before, files.operations, losses=1)):
        top = tmp_path / f"{number}"
        state.write(top)
        found.add((read(top / "root", "a/x"), state.may_follow(heard)))
        shutil.rmtree(top)
    assert (b"old", False) in found
    assert (None, True) in found
    assert (b"old", True) not in found


def test_an_empty_folder_of_pins_is_swept_and_one_with_pins_is_not(tmp_path: Path) -> None:
    (tmp_path / ".ckpt-pins").mkdir()
    put(tmp_path, ".ckpt-notes/x", b"")
    assert run(lambda storage: storage.step_dirs(), tmp_path) == []
    sweep_root(tmp_path)
    assert names(tmp_path) == [".ckpt-notes"]
