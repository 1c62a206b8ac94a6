"""`ckpt doctor`: what it finds, and that it leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from ckpt._inspection import disk, machine
from tests.support.command import check_golden, ckpt_command, on_terminal, settled, without_styles
from tests.support.running_command import as_ordinary_user, let_everybody_enter, running

SHARED_MEMORY = Path("/dev/shm")


def names_of(found: dict, group: str) -> list[str]:
    return [each["name"] for each in found["findings"] if each["group"] == group]


def test_the_machine_alone() -> None:
    ran = ckpt_command("doctor", "--json")
    assert ran.err == ""
    assert ran.json["path"] is None
    assert names_of(ran.json, "software")[:3] == ["ckpt", "python", "jax"]
    assert {"processors", "memory", "open files"} <= set(names_of(ran.json, "machine"))
    assert ran.status == (1 if ran.json["problems"] else 0)


def test_output_for_a_disk(run_root: Path) -> None:
    ran = ckpt_command("doctor", run_root)
    assert (ran.status, ran.err) == (0, "")
    text = settled(ran.out, root=run_root)
    # The rest differs from machine to machine.
    text = text[: text.index("machine")] + text[text.index("disk") :]
    for pattern, stand_in in (
        (r"(software  ckpt|python|jax|jaxlib|numpy|tensorstore)(  ok  ).*", r"\1\2<version>"),
        (r"file system  (ok|warning)  .*", "file system  ok  <kind>"),
        (r"[\d.]+ \wi?B of [\d.]+ \wiB free", "<free>"),
        (r"has [\d.]+ KiB", "has <size>"),
        (r"[\d.e-]+ ms", "<time>"),
        (r"reflinks  ok  .*", "reflinks  ok  <found>"),
        (r"(?m)^(warning: |this machine and).*\n", ""),
    ):
        text = re.sub(pattern, stand_in, text)
    check_golden("doctor", text)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    assert ckpt_command("doctor", tmp_path).status == 0
    assert list(tmp_path.iterdir()) == []


def test_the_directory_above_is_checked_for_a_root_that_is_to_be_made(tmp_path: Path) -> None:
    ran = ckpt_command("doctor", tmp_path / "a" / "b", "--json")
    assert ran.status == 0
    (said,) = [each for each in ran.json["findings"] if each["name"] == "directory"]
    assert "does not exist" in said["found"]
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_place_for_steps(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("x")
    ran = ckpt_command("doctor", tmp_path / "notes" / "runs")
    assert (ran.status, ran.out) == (2, "")
    assert "is a file" in ran.err


def test_a_directory_that_may_not_be_written_is_a_problem(tmp_path: Path) -> None:
    place = tmp_path / "runs"
    place.mkdir()
    place.chmod(0o555)
    let_everybody_enter(tmp_path)
    ran = as_ordinary_user("doctor", place, "--json")
    assert ran.status == 1
    (problem,) = [each for each in ran.json["findings"] if each["verdict"] == "problem"]
    assert problem["name"] == "write"
    assert "Permission denied" in problem["found"]
    assert problem["advice"]


@pytest.mark.parametrize("command", ["doctor", "watch"])
def test_a_directory_that_may_not_be_entered_is_told_in_a_line(
    command: str, tmp_path: Path
) -> None:
    (tmp_path / "closed" / "inner" / "runs").mkdir(parents=True)
    let_everybody_enter(tmp_path)
    (tmp_path / "closed").chmod(0)
    try:
        ran = as_ordinary_user(command, tmp_path / "closed" / "inner" / "runs")
    finally:
        (tmp_path / "closed").chmod(0o700)
    assert ran.status == (1 if command == "doctor" else 2)
    assert "Traceback" not in ran.err


@pytest.mark.skipif(not os.access(SHARED_MEMORY, os.W_OK), reason="there is no /dev/shm")
def test_a_file_system_in_memory_is_a_warning() -> None:
    ran = ckpt_command("doctor", SHARED_MEMORY, "--json")
    found = {each["name"]: each for each in ran.json["findings"] if each["group"] == "disk"}
    assert (found["file system"]["found"], found["file system"]["verdict"]) == ("tmpfs", "warning")
    assert not list(SHARED_MEMORY.glob(".ckpt-trial-*"))


def test_a_file_system_without_direct_io_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Newer kernels have direct I/O even in memory, so it is taken away.
    monkeypatch.delattr(os, "O_DIRECT")
    found = {each.name: each for each in disk.disk(tmp_path)}
    assert found["direct I/O"].verdict == "warning"
    assert found["fsync"].verdict == "ok"


def test_a_step_that_does_not_fit_is_a_problem(tmp_path: Path) -> None:
    found = {each.name: each for each in disk.disk(tmp_path, needed=1 << 60)}
    assert found["space"].verdict == "problem"


def test_a_store_in_memory() -> None:
    ran = ckpt_command("doctor", "memory://runs/a", "--json")
    assert ran.status == 0
    assert names_of(ran.json, "store") == ["conditional writes", "write latency", "read latency"]


def test_a_store_that_cannot_be_reached_is_a_problem() -> None:
    ran = ckpt_command(
        "doctor",
        "s3://bucket/runs",
        "--json",
        AWS_ENDPOINT_URL="http://127.0.0.1:9",
        AWS_ACCESS_KEY_ID="x",
        AWS_SECRET_ACCESS_KEY="x",
    )
    assert ran.status == 1
    (problem,) = [each for each in ran.json["findings"] if each["verdict"] == "problem"]
    assert problem["group"] == "store"


# Stops in the middle of the trials until its input ends.
_STOPPED = """
import sys
from ckpt._inspection import disk
from ckpt.cli.app import run

def wait(folder):
    (folder / "file").touch()
    print(folder, flush=True)
    sys.stdin.read()

disk._TRIALS = (("wait", wait),)
raise SystemExit(run(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"]
)
def test_its_files_are_removed_when_it_is_interrupted(
    number: int, status: int, tmp_path: Path
) -> None:
    with running("doctor", tmp_path, script=_STOPPED) as command:
        folder = Path(command.line().strip())
        assert (folder / "file").exists()
        command.interrupt(number)
        assert command.end().status == status
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_table_fits_the_terminal(columns: int, tmp_path: Path) -> None:
    _, shown = on_terminal("doctor", tmp_path, columns=columns)
    table = without_styles(shown).split("\n\n")[0].splitlines()
    assert len(table) > 10
    assert max(map(len, table)) <= columns


def test_limits_of_containers(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/job/step\n")
    (tmp_path / "job" / "step").mkdir(parents=True)
    (tmp_path / "job" / "memory.max").write_text("1048576\n")
    (tmp_path / "job" / "step" / "memory.max").write_text("max\n")
    (tmp_path / "job" / "step" / "cpu.max").write_text("150000 100000\n")
    assert machine.memory_limit(tmp_path, own) == 1 << 20
    assert machine.processor_quota(tmp_path, own) == 1.5
    assert machine.memory_limit(tmp_path / "none", own) is None


def test_limits_of_older_containers(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("5:cpu,cpuacct:/job\n4:memory:/job\n")
    (tmp_path / "memory" / "job").mkdir(parents=True)
    (tmp_path / "cpu" / "job").mkdir(parents=True)
    (tmp_path / "memory" / "job" / "memory.limit_in_bytes").write_text("2097152")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712")
    (tmp_path / "cpu" / "job" / "cpu.cfs_quota_us").write_text("50000")
    (tmp_path / "cpu" / "job" / "cpu.cfs_period_us").write_text("100000")
    assert machine.memory_limit(tmp_path, own) == 2 << 20
    assert machine.processor_quota(tmp_path, own) == 0.5


@pytest.mark.parametrize(
    ("older", "newer"), [("0.9.9", "0.10"), ("2", "2.0.1"), ("0.1.86.dev3", "0.1.87")]
)
def test_versions_are_compared_by_their_numbers(older: str, newer: str) -> None:
    assert machine.numbers(older) < machine.numbers(newer)


def test_the_kind_of_a_file_system(tmp_path: Path) -> None:
    device = os.stat(tmp_path).st_dev
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"1 0 {os.major(device)}:{os.minor(device)} / / rw - first /dev/a rw\n"
        f"2 1 {os.major(device)}:{os.minor(device)} / {tmp_path} rw - second /dev/a rw\n"
        "3 1 99:99 / /elsewhere rw - third /dev/b rw\n"
    )
    assert disk.file_system_of(tmp_path, mounts) == "second"
    assert disk.file_system_of(tmp_path, tmp_path / "none") == "unknown"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc here")
def test_a_view_of_the_kernel_is_refused_in_one_line() -> None:
    for path in ("/proc", "/proc/self/runs"):
        ran = ckpt_command("doctor", path)
        assert (ran.status, ran.out) == (2, "")
        assert ran.err.count("\n") == 1
        assert "which is proc" in ran.err
