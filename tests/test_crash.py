"""Promise 1: a kill or a power cut at any instant leaves committed steps whole, none by halves."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import ckpt
import ckpt.sync
from tests.children.states import state_of
from tests.disk import MODIFYING, Disk, system_calls
from tests.trees import assert_same

SAVER = str(Path(__file__).parent / "children" / "saver.py")
ATTEMPT = ".orbax-checkpoint-tmp-"
KILLED = -9


def start(root: Path, *arguments: object, under: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Start a saver, alone or `under` a tracer."""
    command = [*under, sys.executable, SAVER, str(root), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def acknowledged(lines: Iterable[str]) -> list[int]:
    return [int(line.removeprefix("ack ")) for line in lines]


def attempts(root: Path) -> list[str]:
    return [name for name in os.listdir(root) if ATTEMPT in name]


def check_root(root: Path, mode: str, acks: list[int]) -> int:
    """Check all that a crash may not touch; return how many attempts it had left behind.

    Args:
        root: The root, as the crash left it.
        mode: What the saver did: see `saver.py`.
        acks: Every number whose durability was acknowledged and that nobody has deleted.
    """
    if not root.exists():
        assert not acks
        return 0
    left = len(attempts(root))
    visible = sorted(int(name) for name in os.listdir(root) if name.isdigit())
    with ckpt.sync.CheckpointManager(root, read_only=True) as reader:
        assert reader.all_steps() == visible, "a half-visible step"
        assert reader.latest_step() == (visible[-1] if visible else None)
    assert len(attempts(root)) == left, "a reader touched what it must not"

    with ckpt.sync.CheckpointManager(root) as mgr:
        assert attempts(root) == [], "dead attempts were not removed"
        assert mgr.all_steps() == visible
        numbers = {step: mgr.metadata(step).info.metadata for step in visible}
        for step, number in numbers.items():
            assert_same(mgr.restore(step), state_of(number))
        if mode == "append":
            assert set(acks) <= set(visible)
            assert all(step == number for step, number in numbers.items())
        elif mode == "overwrite":
            assert not acks or numbers[0] >= acks[-1], "the old version is back"
        elif acks:
            assert acks[-1] in visible

        # Saving goes on where it was, and what was seen once does not go.
        following = max([*numbers.values(), -1]) + 1
        step = 0 if mode == "overwrite" else following
        save = mgr.save(step, state_of(following), metadata=following, overwrite=True)
        save.result()
        assert_same(mgr.restore(step), state_of(following))
        for step in mgr.all_steps()[:-2]:
            mgr.delete(step)
    assert attempts(root) == []
    return left


def kill_after_a_while(root: Path, mode: str, choice: random.Random) -> list[int]:
    """Kill a saver at a random moment after a random acknowledgement; return what it had said."""
    with start(root, mode) as child:
        assert child.stdout is not None
        said = [child.stdout.readline() for _ in range(choice.randint(1, 3))]
        time.sleep(choice.uniform(0, 0.1))
        child.kill()
        said += child.stdout
    assert child.returncode == KILLED
    return acknowledged(said)


@pytest.mark.parametrize("mode", ["append", "overwrite", "preserve"])
def test_a_kill_at_a_random_moment_loses_nothing_acknowledged(tmp_path: Path, mode: str) -> None:
    def rounds(seed: int) -> int:
        choice = random.Random(f"{mode} {seed}")
        root = tmp_path / str(seed)
        left = 0
        for _ in range(4 if mode == "append" else 3):
            left += check_root(root, mode, kill_after_a_while(root, mode, choice))
        return left

    with ThreadPoolExecutor(2) as two:
        left = sum(two.map(rounds, range(2)))
    assert left, "no kill hit a save under way, so nothing was tested"


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


STRACE = [shutil.which("strace") or "", "-f", "-qq"]


def can_trace() -> bool:
    """Whether strace is there, knows what is asked of it, and may trace."""
    trial = [*STRACE, "--seccomp-bpf", "-e", "trace=fsync", "-o", os.devnull, sys.executable, "-V"]
    return bool(STRACE[0]) and not subprocess.run(trial, capture_output=True).returncode


needs_strace = pytest.mark.skipif(not can_trace(), reason="needs strace, and leave to use it")


def traced(*options: str) -> list[str]:
    return [*STRACE, *options]


def injecting(calls: str, what: str, root: Path, path: str | None) -> list[str]:
    """A tracer that does `what` on `calls`, only on those that concern `path` if there is one."""
    options = ["-e", f"trace={calls}", "-e", f"inject={calls}:{what}", "-o", os.devnull]
    if "signal" not in what:
        # Three times as fast; but strace 6.1 then injects a signal into first calls only.
        options.append("--seccomp-bpf")
    return traced(*options, *(["-P", path.format(root=root)] if path else []))


def prepared(root: Path) -> None:
    """A root with the committed steps 0 and 1."""
    with ckpt.sync.CheckpointManager(root) as mgr:
        for step in range(2):
            mgr.save(step, state_of(step), metadata=step).result()


# Kills on entry to one system call: mode, the calls, the path they must concern, which of them.
CALLS = {
    "before the attempt has its name": ("append", "?rename,?renameat", None, 1),
    "at a write of array data": ("append", "pwrite64", None, 1),
    "before a small file is durable": ("append", "fsync", None, 2),
    "before the rename that publishes": ("append", "?renameat2", "{root}/2", 1),
    "between that rename and its durability": ("append", "fsync", "{root}", 1),
    "before the swap of an overwritten step": ("overwrite", "?renameat2", "{root}/0", 2),
    "between the swap and its durability": ("overwrite", "fsync", "{root}", 1),
    "when the first old file was removed": ("overwrite", "unlinkat", None, 2),
    "before an old step gets its trash name": ("preserve", "?rename,?renameat", "{root}/0", 1),
    "in the removal of an old step": ("preserve", "unlinkat", None, 3),
}


@needs_strace
def test_a_kill_at_a_system_call_loses_nothing_acknowledged(tmp_path: Path) -> None:
    def die_at(point: str) -> None:
        mode, calls, path, count = CALLS[point]
        root = tmp_path / point.replace(" ", "-")
        prepared(root)
        tracer = injecting(calls, f"signal=KILL:when={count}", root, path)
        with start(root, mode, 3, under=tracer) as child:
            acks = acknowledged(child.stdout or ())
        assert child.returncode == KILLED, f"{point}: never reached"
        check_root(root, mode, [*([1] if mode != "overwrite" else []), *acks])

    with ThreadPoolExecutor(2) as two:
        list(two.map(die_at, CALLS))


# Errors of system calls: mode, the calls, the path they must concern, the error, which of them.
FAULTS = {
    "array data": ("append", "pwrite64", None, "ENOSPC", 1),
    "durability of a file": ("append", "fsync", None, "EIO", 2),
    "the rename that publishes": ("append", "?renameat2", "{root}/2", "EIO", 1),
    "durability of that rename": ("append", "fsync", "{root}", "EIO", 1),
    "the swap that overwrites": ("overwrite", "?renameat2", "{root}/0", "EIO", 2),
    "durability of that swap": ("overwrite", "fsync", "{root}", "EIO", 1),
    "removal of old files": ("overwrite", "unlinkat", None, "EIO", 2),
}


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[str]]]:
    """For every fault the root of a saver that met it, and the lines it printed."""
    base = tmp_path_factory.mktemp("faults")

    def meet(fault: str) -> tuple[Path, list[str]]:
        mode, calls, path, error, count = FAULTS[fault]
        root = base / fault.replace(" ", "-")
        prepared(root)
        tracer = injecting(calls, f"error={error}:when={count}", root, path)
        with start(root, mode, 3 if mode == "append" else 1, under=tracer) as child:
            lines = list(child.stdout or ())
        assert child.returncode == 0
        return root, lines

    with ThreadPoolExecutor(2) as two:
        return dict(zip(FAULTS, two.map(meet, FAULTS), strict=True))


@needs_strace
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "removal of old files"])
def test_a_save_that_the_disk_refused_is_not_there(
    faulty: dict[str, tuple[Path, list[str]]], fault: str
) -> None:
    mode, _, _, error, _ = FAULTS[fault]
    root, lines = faulty[fault]
    acks = acknowledged(line for line in lines if line.startswith("ack"))
    failed = {int(line.split()[1]): line.split()[2] for line in lines if line.startswith("failed")}
    assert set(failed.values()) == {str(getattr(errno, error))}
    assert attempts(root) == []
    with ckpt.sync.CheckpointManager(root, read_only=True) as mgr:
        numbers = {mgr.metadata(step).info.metadata for step in mgr.all_steps()}
    assert numbers == {0, 1, *acks}
    check_root(root, mode, [0, 1, *acks] if mode == "append" else [])


@needs_strace
def test_an_overwrite_whose_old_files_cannot_be_removed_has_succeeded(
    faulty: dict[str, tuple[Path, list[str]]],
) -> None:
    root, lines = faulty["removal of old files"]
    assert acknowledged(lines) == [2]
    assert check_root(root, "overwrite", [2]) == 1


@pytest.fixture(scope="module", params=["append", "overwrite"])
def trace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The root and the traced system calls of two saves into a root that was not there."""
    base = tmp_path_factory.mktemp("trace")
    log, root = base / "log", base / "new" / "root"
    options = ["--seccomp-bpf", "-y", "-s", "16", "-o", str(log), "-e", f"trace={MODIFYING}"]
    with start(root, request.param, 2, under=traced(*options)) as child:
        assert acknowledged(child.stdout or ()) == [0, 1]
    assert child.returncode == 0
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
    assert len(published) == 3  # the root metadata and two saves
    for _, files in published[1:]:
        relative = {Path(*Path(file).relative_to(root).parts[1:]) for file in files}
        assert {Path("ckpt.json"), Path("state/manifest.ocdbt")} <= relative
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
            assert len(published) == 1 + acks
            time, step = published[-1]
            assert disk.is_durable_since(str(root), time)
            assert disk.not_durable(step) == [], "changed after it was published"

    disk = replay(log, watch)
    assert acks == 2
    files = {str(path) for path in root.rglob("*") if path.name != "_ROOT_METADATA"}
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
