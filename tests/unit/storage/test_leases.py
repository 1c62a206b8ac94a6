"""Attempts have one owner: nobody takes them from a live writer, and dead ones are removed."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import anyio
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt._settings import Timeouts
from ckpt.storage._base import AttemptEntry
from ckpt.storage._local.leases import sweep_root
from ckpt.storage._local.storage import LocalStorage
from tests.support.odd_items import Odd, OddHandler

T = TypeVar("T")
PATIENCE_S = 120
STATE = {"w": np.arange(100_000.0)}
WRITER = """
import os, signal, sys, anyio
from pathlib import Path
from ckpt import Timeouts
from ckpt.storage._local.storage import LocalStorage

async def main():
    storage = LocalStorage(Path(sys.argv[1]), Timeouts(lease=float(sys.argv[2])))
    await storage.prepare()
    attempt = await storage.begin("7")
    await storage.write(attempt, "state/x", b"some bytes")
    os.write(1, b"begun\\n")
    signal.pause()

anyio.run(main)
"""


def run(work: Callable[[LocalStorage], Awaitable[T]], root: Path, **timeouts: float) -> T:
    async def main() -> T:
        storage = LocalStorage(root, Timeouts(**timeouts))
        await storage.prepare()
        return await work(storage)

    return anyio.run(main)


def names(root: Path) -> set[str]:
    return set(os.listdir(root))


def lease_of(root: Path) -> Path:
    [lease] = [root / name for name in names(root) if name.startswith(".ckpt-lease-")]
    return lease


def sweep(root: Path) -> list[str]:
    return run(lambda storage: storage.sweep(), root)


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    """A process that has begun an attempt in `tmp_path` and stands still."""
    command = [sys.executable, "-c", WRITER, str(tmp_path), "600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "begun\n"
            yield child
        finally:
            child.kill()


def elsewhere(lease: Path, **changes: object) -> None:
    """Let a lease be one of another machine, or changed so; its lock stays as it is."""
    changes = changes or {"boot": "another"}
    content = json.loads(lease.read_bytes())
    stamp = lease.stat()
    with open(lease, "r+") as file:
        file.write(json.dumps(content | changes).ljust(len(json.dumps(content))))
    os.utime(lease, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


def aged(path: Path, seconds: float) -> None:
    now = time.time()
    os.utime(path, (now - seconds, now - seconds))


def test_the_attempt_of_a_live_process_is_left_however_old_its_lease(
    tmp_path: Path, writer: subprocess.Popen[str]
) -> None:
    before = names(tmp_path)
    assert len(before) == 2
    assert sweep(tmp_path) == []
    aged(lease_of(tmp_path), 1e6)
    assert sweep(tmp_path) == []
    os.kill(writer.pid, signal.SIGSTOP)
    assert sweep(tmp_path) == []
    elsewhere(lease_of(tmp_path))
    aged(lease_of(tmp_path), 1e6)
    assert sweep(tmp_path) == []
    assert names(tmp_path) == before


def test_the_attempt_of_a_dead_process_of_this_machine_is_removed_at_once(
    tmp_path: Path, writer: subprocess.Popen[str]
) -> None:
    writer.kill()
    writer.wait(PATIENCE_S)
    assert len(sweep(tmp_path)) == 1
    assert names(tmp_path) == set()


def attempts(root: Path) -> list[AttemptEntry]:
    return run(lambda storage: storage.attempts(), root)


def test_an_attempt_is_listed_with_its_writer_and_whether_that_lives(
    tmp_path: Path, writer: subprocess.Popen[str]
) -> None:
    [entry] = attempts(tmp_path)
    assert (entry.step_dir, entry.is_live, entry.nbytes) == ("7", True, 10)
    assert entry.owner.endswith(f", process {writer.pid}")
    assert entry.age_seconds is not None
    assert 0 <= entry.age_seconds < PATIENCE_S
    writer.kill()
    writer.wait(PATIENCE_S)
    before = names(tmp_path)
    [entry] = attempts(tmp_path)
    assert (entry.step_dir, entry.is_live, entry.is_removal) == ("7", False, False)
    assert names(tmp_path) == before
    assert any(entry.id in name for name in sweep(tmp_path))
    assert attempts(tmp_path) == []


def test_a_silent_attempt_of_another_machine_is_listed_as_a_sweep_sees_it(
    tmp_path: Path, writer: subprocess.Popen[str]
) -> None:
    writer.kill()
    writer.wait(PATIENCE_S)
    elsewhere(lease_of(tmp_path))
    aged(lease_of(tmp_path), 500)
    [entry] = attempts(tmp_path)
    assert entry.is_live
    assert entry.silent_seconds is not None
    assert entry.silent_seconds > 490
    aged(lease_of(tmp_path), 700)
    assert [each.is_live for each in attempts(tmp_path)] == [False]


@pytest.mark.parametrize("content", [b"", b"[]", b'{"seconds": 1, "begun": "x", "pid": []}'])
def test_a_lease_that_says_nothing_is_listed_all_the_same(content: bytes, tmp_path: Path) -> None:
    token = "0" * 32
    (tmp_path / f"7.orbax-checkpoint-tmp-{token}").mkdir()
    (tmp_path / f".ckpt-lease-{token}").write_bytes(content)
    [entry] = attempts(tmp_path)
    assert (entry.step_dir, entry.id, entry.owner, entry.age_seconds) == ("7", token, "", None)


def test_what_is_being_removed_and_leases_alone_are_listed(tmp_path: Path) -> None:
    removed, alone = "1" * 32, "2" * 32
    (tmp_path / f"7.orbax-checkpoint-tmp-{removed}.trash").mkdir()
    (tmp_path / f".ckpt-lease-{alone}").write_bytes(b"")
    assert [(each.id, each.is_removal) for each in attempts(tmp_path)] == [(removed, True)]
    aged(tmp_path / f".ckpt-lease-{alone}", 1e6)
    assert [(each.step_dir, each.id) for each in attempts(tmp_path)] == [
        ("", alone),
        ("7", removed),
    ]
    assert len(sweep(tmp_path)) == 2


def test_an_attempt_of_another_machine_is_left_until_its_lease_has_run_out(
    tmp_path: Path, writer: subprocess.Popen[str]
) -> None:
    writer.kill()
    writer.wait(PATIENCE_S)
    elsewhere(lease_of(tmp_path))
    before = names(tmp_path)
    aged(lease_of(tmp_path), 590)
    assert sweep(tmp_path) == []
    assert names(tmp_path) == before
    aged(lease_of(tmp_path), 610)
    assert len(sweep(tmp_path)) == 1
    assert names(tmp_path) == set()


def test_where_there_are_no_locks_the_lease_decides(
    tmp_path: Path, writer: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(95, "not supported")

    monkeypatch.setattr(fcntl, "flock", refused)
    writer.kill()
    writer.wait(PATIENCE_S)
    assert sweep(tmp_path) == []
    aged(lease_of(tmp_path), 610)
    assert len(sweep(tmp_path)) == 1
    assert names(tmp_path) == set()


@pytest.mark.parametrize("changes", [{"boot": None}, {"device": -1}])
def test_a_lock_that_may_be_another_one_proves_nothing(
    tmp_path: Path, writer: subprocess.Popen[str], changes: dict[str, object]
) -> None:
    """It could not be taken, or was taken by way of another mount of the same directory."""
    writer.kill()
    writer.wait(PATIENCE_S)
    elsewhere(lease_of(tmp_path), **changes)
    assert sweep(tmp_path) == []
    aged(lease_of(tmp_path), 610)
    assert len(sweep(tmp_path)) == 1


def test_a_writer_that_got_no_lock_is_not_taken_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.flock
    refused: list[Any] = []

    def once(fd: int, operation: int) -> None:
        if not refused:
            refused.append(fd)
            raise OSError(37, "no locks available")
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", once)

    async def work(storage: LocalStorage) -> None:
        attempt = await storage.begin("1")
        assert refused
        assert await storage.sweep() == []
        await storage.write(attempt, "x", b"x")
        await storage.publish(attempt, overwrite=False)

    run(work, tmp_path)
    assert names(tmp_path) == {"1"}


def test_a_cleaner_that_is_stopped_with_the_lock_does_not_stop_a_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.flock
    held: list[Any] = []

    def after_a_cleaner(fd: int, operation: int) -> None:
        """The cleaner comes between the making of the lease and its first lock."""
        if not held:
            held.append(os.open(lease_of(tmp_path), os.O_RDWR))
            real(held[0], fcntl.LOCK_EX)
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", after_a_cleaner)

    async def work(storage: LocalStorage) -> None:
        with anyio.fail_after(PATIENCE_S):
            attempt = await storage.begin("1")
        # It gets the lock no more, and is not taken for dead when the cleaner goes on.
        os.close(held[0])
        assert await storage.sweep() == []
        await storage.write(attempt, "x", b"x")
        await storage.publish(attempt, overwrite=False)

    run(work, tmp_path)
    assert names(tmp_path) == {"1"}


def test_a_lease_is_not_renewed_once_its_attempt_has_ended(tmp_path: Path) -> None:
    """The number of its descriptor may be that of another file by then."""

    async def work(storage: LocalStorage) -> None:
        attempt = await storage.begin("1")
        await storage.discard(attempt)
        taken = [os.open(tmp_path, os.O_RDONLY) for _ in range(8)]
        try:
            aged(tmp_path, 1000)
            await storage.renew(attempt)
            assert time.time() - tmp_path.stat().st_mtime > 900
            await storage.discard(attempt)
            for fd in taken:
                os.fstat(fd)
        finally:
            for fd in taken:
                os.close(fd)

    run(work, tmp_path)


def test_a_full_disk_can_be_cleaned(
    tmp_path: Path, writer: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the store is learnt without room for a directory, too."""
    writer.kill()
    writer.wait(PATIENCE_S)
    elsewhere(lease_of(tmp_path))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(os, "mkdir", full)
    assert sweep_root(tmp_path) == []
    aged(lease_of(tmp_path), 610)
    assert len(sweep_root(tmp_path)) == 1


@pytest.mark.parametrize("content", [b"", b"null", b"{", b'{"seconds": "x"}', b"[" * 5000])
def test_a_lease_that_says_nothing_is_left_for_an_hour(tmp_path: Path, content: bytes) -> None:
    attempt = tmp_path / f"7.orbax-checkpoint-tmp-{'0' * 32}"
    attempt.mkdir()
    lease = tmp_path / f".ckpt-lease-{'0' * 32}"
    lease.write_bytes(content)
    assert sweep(tmp_path) == []
    aged(lease, 3590)
    assert sweep(tmp_path) == []
    aged(lease, 3610)
    assert sweep(tmp_path) == [attempt.name]
    assert names(tmp_path) == set()


def test_an_attempt_without_a_lease_is_left_for_an_hour(tmp_path: Path) -> None:
    attempt = tmp_path / f"7.orbax-checkpoint-tmp-{'0' * 32}"
    attempt.mkdir()
    assert sweep(tmp_path) == []
    aged(attempt, 3610)
    assert sweep(tmp_path) == [attempt.name]


def test_a_lease_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("{}")
    aged(other, 1e6)
    attempt = tmp_path / f"7.orbax-checkpoint-tmp-{'0' * 32}"
    attempt.mkdir()
    (tmp_path / f".ckpt-lease-{'0' * 32}").symlink_to(other)
    assert sweep(tmp_path) == []
    assert attempt.is_dir()
    assert other.read_text() == "{}"


def test_trash_is_removed_and_nothing_else(tmp_path: Path) -> None:
    token = "0" * 32
    (tmp_path / f"7.orbax-checkpoint-tmp-{token}.trash" / "state").mkdir(parents=True)
    (tmp_path / f".ckpt-clock-{token}").mkdir()
    kept = {"7", "x.orbax-checkpoint-tmp-1", "7.orbax-checkpoint-tmp-.trash", ".ckpt-lease-x"}
    for name in kept:
        (tmp_path / name).mkdir()
    sweep(tmp_path)
    assert names(tmp_path) == kept


def test_an_attempt_is_never_swept_while_it_is_begun_or_ended(tmp_path: Path) -> None:
    """Cleaners look all the time; whose lock it is does not depend on the process."""
    stop = threading.Event()

    def look() -> None:
        async def main(storage: LocalStorage) -> None:
            while not stop.is_set():
                assert all(name.endswith(".trash") for name in await storage.sweep())

        run(main, tmp_path)

    async def main(storage: LocalStorage) -> None:
        for number in range(150):
            attempt = await storage.begin(str(number))
            await storage.write(attempt, "x", b"x")
            if number % 2:
                await storage.discard(attempt)
            else:
                await storage.publish(attempt, overwrite=False)

    with ThreadPoolExecutor(2) as cleaners:
        futures = [cleaners.submit(look) for _ in range(2)]
        try:
            run(main, tmp_path)
        finally:
            stop.set()
        for future in futures:
            future.result(PATIENCE_S)
    assert names(tmp_path) == {str(number) for number in range(0, 150, 2)}


def held(root: Path, inside: Callable[[], None], **timeouts: float) -> ckpt.Commit:
    """A save that does `inside` while it has its attempt and nothing is published."""

    def observe(event: ckpt.types.Event) -> None:
        if event.operation == "save" and event.phase == "record":
            inside()

    with ckpt.sync.CheckpointManager(
        root, observers=[observe], timeouts=Timeouts(**timeouts)
    ) as mgr:
        commit = mgr.save(0, STATE)
        commit.exception(PATIENCE_S)
    return commit


def test_a_writer_renews_its_lease(tmp_path: Path) -> None:
    gate = threading.Event()
    item = Odd({"w": np.arange(8)}, gate=gate)
    with ckpt.sync.CheckpointManager(
        tmp_path, handlers=[OddHandler()], timeouts=Timeouts(lease=0.6)
    ) as mgr:
        commit = mgr.save(0, item)
        assert item.reached.wait(PATIENCE_S)
        lease = lease_of(tmp_path)
        stamp = lease.stat().st_mtime_ns
        deadline = time.monotonic() + PATIENCE_S
        while lease.stat().st_mtime_ns == stamp:
            assert time.monotonic() < deadline
        gate.set()
        commit.result(PATIENCE_S)
    assert names(tmp_path) == {"0"}


@pytest.mark.parametrize("recreated", [False, True])
def test_a_writer_whose_attempt_was_taken_publishes_nothing(
    tmp_path: Path, recreated: bool
) -> None:
    def take() -> None:
        [attempt] = [name for name in names(tmp_path) if "orbax-checkpoint-tmp" in name]
        os.rename(tmp_path / attempt, tmp_path / f"{attempt}.trash")
        if recreated:
            (tmp_path / attempt / "state").mkdir(parents=True)

    commit = held(tmp_path, take)
    error = commit.exception()
    assert isinstance(error, ckpt.errors.StorageError)
    assert error.step == 0
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        assert mgr.all_steps() == []
        mgr.save(0, STATE).result()
    assert names(tmp_path) == {"0"}


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "1", None, True, 10**400])
def test_times_that_cannot_be_meant_are_refused(seconds: Any) -> None:
    for name in ("lease", "exit"):
        with pytest.raises(ckpt.errors.InvalidArgumentError, match=f"Timeouts.{name}="):
            Timeouts(**{name: seconds})
