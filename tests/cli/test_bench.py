"""`ckpt bench`: what it measures, and that nothing of it stays."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import click
import pytest

from ckpt.cli.output import ByteSize
from tests.support.command import Ran, check_golden, ckpt_command, on_terminal, without_styles
from tests.support.running_command import as_ordinary_user, let_everybody_enter, running

SHARED_MEMORY = Path("/dev/shm")
SMALL = ("--size", "4MiB", "--rounds", 1)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def ran(place: Path) -> Ran:
    return ckpt_command("bench", place, "--json", "--size", "4MiB", "--rounds", 2)


def test_figures(ran: Ran, place: Path) -> None:
    assert (ran.status, ran.err) == (0, "")
    found = ran.json
    assert (found["path"], found["nbytes"], found["rounds"]) == (str(place), 4 << 20, 2)
    by_name = {each["name"]: each for each in found["measured"]}
    assert list(by_name) == ["raw write", "save", "blocked", "raw read", "restore"]
    for each in by_name.values():
        assert 0 < each["least_seconds"] <= each["seconds"] <= each["most_seconds"]
    assert by_name["blocked"]["seconds"] < by_name["save"]["seconds"]
    for name, raw in (("save", "raw write"), ("restore", "raw read")):
        share = by_name[name]["rate"] / by_name[raw]["rate"]
        assert by_name[name]["of_raw"] == pytest.approx(share)
        assert by_name[raw]["of_raw"] is None


def test_nothing_is_left_behind(ran: Ran, place: Path) -> None:
    assert ran.status == 0
    assert list(place.iterdir()) == []


def test_output(tmp_path: Path) -> None:
    ran = ckpt_command("bench", tmp_path, *SMALL)
    assert (ran.status, ran.err) == (0, "")
    text = re.sub(r"\(\w+, (past|through) the page cache\)", "(<disk>)", ran.out)
    text = re.sub(r"[\d.]+ (ms|s)(?=\W)|[\d.e+]+ [KMG]iB/s|\d+%", "<figure>", text)
    text = re.sub(r" {2,}", "  ", text.replace(str(tmp_path), "<path>"))
    check_golden("bench", text)


@pytest.mark.skipif(not os.access(SHARED_MEMORY, os.W_OK), reason="there is no /dev/shm")
@pytest.mark.parametrize("columns", [40, 200])
def test_the_table_fits_the_terminal_and_works_in_memory(columns: int) -> None:
    status, shown = on_terminal("bench", SHARED_MEMORY, *SMALL, columns=columns)
    assert status == 0
    assert not list(SHARED_MEMORY.glob(".ckpt-trial-*"))
    lines = without_styles(shown).replace("\r", "\n").splitlines()
    assert "round 1 of 1" in lines
    (first,) = [number for number, line in enumerate(lines) if "median" in line]
    assert max(map(len, lines[first : first + 6])) <= columns
    assert "tmpfs" in lines[-1]


# Stops in the middle of the first round until its input ends.
_STOPPED = """
import sys
from ckpt._inspection import disk
from ckpt.cli.app import run

def wait(raw):
    print(raw._folder.parent, flush=True)
    sys.stdin.read()

disk.RawFile.read = wait
raise SystemExit(run(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"]
)
def test_its_files_are_removed_when_it_is_interrupted(
    number: int, status: int, tmp_path: Path
) -> None:
    with running("bench", tmp_path, *SMALL, script=_STOPPED) as command:
        folder = Path(command.line().strip())
        assert (folder / "files" / "raw").stat().st_size == 4 << 20
        command.interrupt(number)
        assert command.end().status == status
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_fails_is_told_and_nothing_stays(tmp_path: Path) -> None:
    ran = ckpt_command("bench", tmp_path, *SMALL, JAX_PLATFORMS="abacus")
    assert (ran.status, ran.out) == (2, "")
    assert "abacus" in ran.err
    assert ran.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_places_and_sizes_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for arguments, words in (
        ((tmp_path / "missing",), "no such directory"),
        ((tmp_path / "file",), "no such directory"),
        (("s3://bucket/runs",), "not a store"),
        ((tmp_path, "--size", "9000TiB"), "Give a smaller --size"),
        ((tmp_path, "--size", "much"), "no size"),
    ):
        ran = ckpt_command("bench", *arguments)
        assert (ran.status, ran.out) == (2, ""), arguments
        assert words in ran.err


def test_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    place = tmp_path / "runs"
    place.mkdir()
    place.chmod(0o555)
    let_everybody_enter(tmp_path)
    ran = as_ordinary_user("bench", place, *SMALL)
    assert (ran.status, ran.out) == (3, "")
    assert "Permission denied" in ran.err


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [("1GiB", 1 << 30), ("1.5 MB", 1_500_000), ("512", 512), ("2kib", 2048), ("1TiB", 1 << 40)],
)
def test_sizes(written: str, nbytes: int) -> None:
    assert ByteSize().convert(written, None, None) == nbytes


@pytest.mark.parametrize("written", ["", "-1", "0", "1 GiBB", "nan", "9" * 400, "1e9"])
def test_sizes_that_are_none(written: str) -> None:
    with pytest.raises(click.BadParameter, match="no size"):
        ByteSize().convert(written, None, None)
