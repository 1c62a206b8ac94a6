"""Promise 1: a kill or a power cut at any instant leaves committed steps whole, none by halves."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import ckpt
import ckpt.sync
from tests.reliability.kills import (
    ATTEMPT,
    KILLED,
    OLD_ACKS,
    acknowledged,
    at_calls,
    at_random,
    attempts,
    check_root,
    prepared,
    saver,
    start,
)
from tests.support.kills import at_call, can_watch, run_watched
from tests.support.traced_disk import MODIFYING, Disk, system_calls


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_kill_at_a_random_moment_loses_nothing_acknowledged(tmp_path: Path) -> None:
    at_random(tmp_path, 9).check(faults=1)


# Where a saver kills itself: mode, phase and which of its events.
PHASES = [
    ("append", "plan", 1),
    ("append", "plan", 3),
    ("append", "stage", 4),
    ("append", "write", 3),
    ("append", "write", 4),
    ("append", "record", 2),
    ("append", "publish", 2),
    ("overwrite", "record", 2),
    ("overwrite", "publish", 2),
    ("preserve", "preserve", 3),
]


@pytest.mark.timeout(300)
def test_a_kill_in_any_phase_loses_nothing_acknowledged(tmp_path: Path) -> None:
    def die_in(point: tuple[str, str, int]) -> None:
        mode, phase, count = point
        root = tmp_path / "-".join(map(str, point))
        with start(root, mode, 100, phase, count) as child:
            acks = acknowledged(child.stdout or ())
        assert child.returncode == KILLED, f"{point} was never reached"
        check_root(root, mode, acks)

    with ThreadPoolExecutor(2) as two:
        list(two.map(die_in, PHASES))


needs_watching = pytest.mark.skipif(not can_watch(), reason="system calls cannot be watched here")


@pytest.mark.slow
@needs_watching
def test_a_kill_at_any_system_call_loses_nothing_acknowledged(tmp_path: Path) -> None:
    at_calls(tmp_path, 3).check(faults=2)


# Kills on entry to one system call: mode, kind or name of the call, its path, which of them.
CALLS = {
    "before the attempt has its name": ("append", "rename", None, 1),
    "at a write of array data": ("append", "pwrite64", None, 1),
    "before a small file is durable": ("append", "sync", None, 2),
    "before the rename that publishes": ("append", "renameat2", "{root}/2", 1),
    "between that rename and its durability": ("append", "sync", "{root}", 1),
    "before the swap of an overwritten step": ("overwrite", "renameat2", "{root}/0", 2),
    "between the swap and its durability": ("overwrite", "sync", "{root}", 1),
    "when the first old file was removed": ("overwrite", "remove", None, 2),
    "before an old step gets its trash name": ("preserve", "rename", "{root}/0", 1),
    "in the removal of an old step": ("preserve", "remove", None, 3),
}


@pytest.mark.slow
@needs_watching
@pytest.mark.timeout(300)
def test_a_kill_at_a_system_call_loses_nothing_acknowledged(tmp_path: Path) -> None:
    def die_at(point: str) -> None:
        mode, kind, path, count = CALLS[point]
        root = tmp_path / point.replace(" ", "-")
        prepared(root)
        path = path and path.format(root=root)
        decide = at_call(count, signal.SIGKILL, kind=kind, path=path)
        run = run_watched(saver(root, mode, 1), decide, below=root, forked=True)
        assert run.returncode == KILLED, f"{point}: never reached"
        acks = acknowledged(run.output.splitlines(keepends=True))
        check_root(root, mode, [*OLD_ACKS[mode], *acks])

    with ThreadPoolExecutor(2) as two:
        list(two.map(die_at, CALLS))


# Errors of system calls: mode, kind or name of the call, its path, the error, which of them.
FAULTS = {
    "array data": ("append", "pwrite64", None, "ENOSPC", 1),
    "durability of a file": ("append", "sync", None, "EIO", 2),
    "the rename that publishes": ("append", "renameat2", "{root}/2", "EIO", 1),
    "durability of that rename": ("append", "sync", "{root}", "EIO", 1),
    "the swap that overwrites": ("overwrite", "renameat2", "{root}/0", "EIO", 2),
    "durability of that swap": ("overwrite", "sync", "{root}", "EIO", 1),
    "removal of old files": ("overwrite", "remove", None, "EIO", 2),
}


def meet(fault: str, root: Path) -> list[str]:
    """Run a saver that meets a fault; return the lines it printed."""
    mode, kind, path, error, count = FAULTS[fault]
    prepared(root)
    path = path and path.format(root=root)
    # What cannot be removed stays so: nobody may wait for it, or try for ever.
    lasting = kind == "remove"
    decide = at_call(count, getattr(errno, error), kind=kind, path=path, lasting=lasting)
    saves = 3 if mode == "append" else 1
    run = run_watched(saver(root, mode, saves), decide, below=root, forked=True)
    assert (run.returncode, bool(run.met)) == (0, True)
    return run.output.splitlines(keepends=True)


@pytest.mark.slow
@needs_watching
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "removal of old files"])
def test_a_save_that_the_disk_refused_is_not_there(tmp_path: Path, fault: str) -> None:
    mode, _, _, error, _ = FAULTS[fault]
    root = tmp_path / "root"
    lines = meet(fault, root)
    acks = acknowledged(lines)
    failed = {int(line.split()[1]): line.split()[2] for line in lines if line.startswith("failed")}
    assert list(failed) == [2]
    assert set(failed.values()) == {str(getattr(errno, error))}
    assert attempts(root) == []
    with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
        numbers = {mgr.metadata(step).info.custom_metadata for step in mgr.all_steps()}
    assert numbers == {0, 1, *acks}
    check_root(root, mode, [0, 1, *acks] if mode == "append" else [])


@needs_watching
def test_an_overwrite_whose_old_files_cannot_be_removed_has_succeeded(tmp_path: Path) -> None:
    root = tmp_path / "root"
    lines = meet("removal of old files", root)
    assert acknowledged(lines) == [2]
    assert check_root(root, "overwrite", [2]) == 1


STRACE = [shutil.which("strace") or "", "-f", "-qq"]


def can_trace() -> bool:
    """Whether strace is there, knows what is asked of it, and may trace."""
    trial = [*STRACE, "--seccomp-bpf", "-e", "trace=fsync", "-o", os.devnull, sys.executable, "-V"]
    return bool(STRACE[0]) and not subprocess.run(trial, capture_output=True).returncode


needs_strace = pytest.mark.skipif(not can_trace(), reason="needs strace, and leave to use it")


@pytest.fixture(scope="module", params=["append", "overwrite"])
def trace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The root and the traced system calls of two saves into a root that was not there."""
    base = tmp_path_factory.mktemp("trace")
    log, root = base / "log", base / "new" / "root"
    options = ["--seccomp-bpf", "-y", "-s", "16", "-o", str(log), "-e", f"trace={MODIFYING}"]
    command = [*STRACE, *options, sys.executable, *saver(root, request.param, 2)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert acknowledged(run.stdout.splitlines(keepends=True)) == [0, 1]
    return root, log


def replay(log: Path, watch: Callable[[Disk, str, tuple[str, ...]], None]) -> Disk:
    """Play a trace to a model of the disk; `watch` sees every call before its effect."""
    disk = Disk()
    for name, paths in system_calls(log, disk):
        watch(disk, name, paths)
        disk.apply(name, paths)
    return disk


def publishes(root: Path, paths: tuple[str, ...]) -> bool:
    target = Path(paths[1])
    return target.parent == root and ATTEMPT not in target.name


@needs_strace
def test_all_of_a_step_is_durable_when_it_is_published(trace: tuple[Path, Path]) -> None:
    root, log = trace
    published = []

    def watch(disk: Disk, name: str, paths: tuple[str, ...]) -> None:
        if name in ("rename", "exchange") and publishes(root, paths):
            assert disk.not_durable(paths[0]) == [], "published before it was durable"
            published.append((name, disk.below(paths[0])))

    replay(log, watch)
    assert len(published) == 2
    for _, files in published:
        relative = {Path(*Path(file).relative_to(root).parts[1:]) for file in files}
        assert {Path("ckpt.json"), Path("default/manifest.ocdbt")} <= relative
        assert len(relative) > 12, "the trace missed files, so this proves nothing"


@needs_strace
def test_a_step_is_acknowledged_when_its_name_is_durable(trace: tuple[Path, Path]) -> None:
    root, log = trace
    published: list[tuple[int, str]] = []
    acks = 0

    def watch(disk: Disk, name: str, paths: tuple[str, ...]) -> None:
        nonlocal acks
        if name in ("rename", "exchange") and publishes(root, paths):
            published.append((disk.now(), paths[1]))
        if name == "ack":
            acks += 1
            assert len(published) == acks
            time, step = published[-1]
            assert disk.is_durable_since(str(root), time)
            assert disk.not_durable(step) == [], "changed after it was published"

    disk = replay(log, watch)
    assert acks == 2
    files = {str(path) for path in root.rglob("*") if path.parent.name != "metadata"}
    assert files <= set(disk.below(str(root))), "the trace missed files, so this proves nothing"


@needs_strace
def test_a_new_root_is_durable_before_its_first_step_is_acknowledged(
    trace: tuple[Path, Path],
) -> None:
    root, log = trace

    def watch(disk: Disk, name: str, paths: tuple[str, ...]) -> None:
        if name == "ack":
            lost = disk.not_durable(str(root.parent.parent), depth=2)
            assert lost == [], "a power cut would take the whole root"

    replay(log, watch)
