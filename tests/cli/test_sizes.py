"""`ckpt ls --by-size`: what uses the space."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from tests.support.command import (
    check_golden,
    ckpt_command,
    in_this_process,
    on_terminal,
    settled,
    without_styles,
)

Capsys = pytest.CaptureFixture[str]
BY = ["step", "item", "pattern", "dtype"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a root of two steps of several items."""
    found = tmp_path_factory.mktemp("sizes") / "runs"
    layers = [{"w": np.full((64, 64), n, np.float32), "b": np.zeros(64)} for n in range(3)]
    with ckpt.sync.CheckpointManager(found) as mgr:
        for step in (1, 2):
            model = {"layers": layers, "head_0": np.ones(8, np.float16), "n": step}
            mgr.save(step, items={"model": model, "rng": np.random.default_rng(step)})
    return found


def bytes_in(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())


@pytest.mark.parametrize("by", BY)
def test_shares_add_up_to_the_files(by: str, root: Path, capsys: Capsys) -> None:
    found = in_this_process(capsys, "ls", "--by-size", root, "--by", by, "--json").json["usage"]
    steps = sum(bytes_in(root / name) for name in ("1", "2"))
    assert found["nbytes"] == sum(each["nbytes"] for each in found["shares"]) == steps
    sizes = [each["nbytes"] for each in found["shares"]]
    assert sizes == sorted(sizes, reverse=True)
    assert (found["shared"], found["linked"]) == (0, 0)


def test_patterns_and_dtypes_have_the_bytes_of_their_arrays(root: Path, capsys: Capsys) -> None:
    found = in_this_process(capsys, "ls", "--by-size", root / "1", "--json").json["usage"]
    assert found["by"] == "pattern"
    shares = {each["name"]: (each["nbytes"], each["count"]) for each in found["shares"]}
    assert shares["model: layers.*.w"] == (3 * 64 * 64 * 4, 3)
    assert shares["model: layers.*.b"] == (3 * 64 * 8, 3)
    assert shares["model: head_*"] == (16, 1)
    assert not any(name.endswith(": n") for name in shares)
    found = in_this_process(capsys, "ls", "--by-size", root, "--by", "dtype", "--json").json[
        "usage"
    ]
    shares = {each["name"]: each["nbytes"] for each in found["shares"]}
    assert shares["float32"] == 2 * 3 * 64 * 64 * 4
    assert shares["float16"] == 2 * 16


def test_output(root: Path) -> None:
    ran = ckpt_command("ls", "--by-size", root / "1")
    assert (ran.status, ran.err) == (0, "")
    lines = settled(ran.out, root=root).splitlines()
    # The shares depend on the other files, in which versions are written down.
    kept = ["  ".join(line.split("  ")[:2]) for line in lines if "model" in line]
    check_golden("ls_by_size", "\n".join([*kept, ""]))
    assert lines[0] == "pattern  size  share  leaves"
    assert lines[-1].startswith("<root>/1: ")


def test_a_root_is_told_by_steps(root: Path, capsys: Capsys) -> None:
    found = in_this_process(capsys, "ls", "--by-size", root, "--json").json["usage"]
    assert found["by"] == "step"
    assert {each["name"]: each["nbytes"] for each in found["shares"]} == {
        name: bytes_in(root / name) for name in ("1", "2")
    }


@pytest.mark.parametrize("by", BY)
def test_hard_links_are_counted_once(by: str, root: Path, tmp_path: Path, capsys: Capsys) -> None:
    copy = Path(shutil.copytree(root, tmp_path / "copy"))
    first, second = (
        max(
            (each for each in (copy / step).rglob("*") if each.is_file()),
            key=lambda each: each.stat().st_size,
        )
        for step in ("1", "2")
    )
    size = second.stat().st_size
    second.unlink()
    os.link(first, second)
    found = in_this_process(capsys, "ls", "--by-size", copy, "--by", by, "--json").json["usage"]
    assert found["nbytes"] == bytes_in(copy / "1") + bytes_in(copy / "2") - size
    assert (found["shared"], found["linked"]) == (size, 0)
    assert sum(each["nbytes"] for each in found["shares"]) == found["nbytes"]
    assert sum(each["shared"] for each in found["shares"]) == size
    text = in_this_process(capsys, "ls", "--by-size", copy, "--by", by).out
    assert "shared by steps and counted once" in text
    # What has a name elsewhere would not be freed by deleting these steps.
    os.link(first, tmp_path / "kept")
    found = in_this_process(capsys, "ls", "--by-size", copy, "--by", by, "--json").json["usage"]
    assert found["linked"] == first.stat().st_size


def test_compressed_arrays_take_what_they_take(tmp_path: Path, capsys: Capsys) -> None:
    zeros = {"w": np.zeros((512, 512))}
    ckpt.sync.save(tmp_path / "x", zeros, formats={"w": ckpt.ArrayFormat(compression="zstd")})
    found = in_this_process(capsys, "ls", "--by-size", tmp_path / "x", "--json").json["usage"]
    assert found["nbytes"] == bytes_in(tmp_path / "x") < zeros["w"].nbytes // 10


def test_a_file_of_another_library(tmp_path: Path, capsys: Capsys) -> None:
    np.savez(tmp_path / "one.npz", w=np.arange(4.0))
    found = in_this_process(capsys, "ls", "--by-size", tmp_path / "one.npz", "--json").json["usage"]
    assert [(each["name"], each["nbytes"]) for each in found["shares"]] == [("w", 32)]


def test_steps_in_a_store(capsys: Capsys) -> None:
    with ckpt.sync.CheckpointManager("memory://sizes/runs") as mgr:
        mgr.save(1, {"w": np.zeros(1000)})
    found = in_this_process(
        capsys, "ls", "--by-size", "memory://sizes/runs", "--by", "pattern", "--json"
    ).json["usage"]
    shares = {each["name"]: each["nbytes"] for each in found["shares"]}
    assert shares["w"] == 8000
    assert sum(shares.values()) == found["nbytes"]


def test_wrong_inputs(tmp_path: Path, root: Path) -> None:
    assert ckpt_command("ls", "--by-size", tmp_path / "no").status == 2
    assert ckpt_command("ls", root, "--by", "colour").status == 2
    ran = ckpt_command("ls", "--by-size", tmp_path)
    assert (ran.status, ran.out) == (0, f"{tmp_path}: no steps\n")


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(columns: int, root: Path) -> None:
    status, shown = on_terminal("ls", root, "--by", "pattern", columns=columns)
    assert status == 0
    assert max(map(len, without_styles(shown).splitlines()[:-1])) <= columns


def test_all_commands_tell_one_size_of_a_step(
    run_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*arguments: object) -> Any:
        ran = in_this_process(capsys, *arguments, "--json")
        assert (ran.status, ran.err) == (0, "")
        return ran.json

    on_disk = {
        step: sum(each.stat().st_size for each in (run_root / step).rglob("*") if each.is_file())
        for step in ("10", "20", "30")
    }
    shares = told("ls", "--by-size", run_root)["usage"]["shares"]
    assert {each["name"]: each["nbytes"] for each in shares} == on_disk
    listed = told("ls", run_root)["steps"]
    assert {str(each["step"]): each["stored_bytes"] for each in listed} == on_disk
    timed = told("stats", run_root)["steps"]
    assert {str(each["step"]): each["stored_bytes"] for each in timed} == on_disk
    assert told("show", run_root / "20")["stored_bytes"] == on_disk["20"]
    [removed] = told("rm", run_root / "10", "--dry-run")["steps"]
    assert removed["stored_bytes"] == on_disk["10"]


def test_the_total_of_a_list_counts_shared_bytes_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"w": np.arange(1 << 14), "frozen": np.ones(1 << 16)}
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        for step in range(4):
            mgr.save(step, {**state, "n": step})
    found = in_this_process(capsys, "ls", tmp_path, "--json").json
    inodes = {
        (each.stat().st_dev, each.stat().st_ino): each.stat().st_size
        for step in "0123"
        for each in (tmp_path / step).rglob("*")
        if each.is_file()
    }
    assert found["stored_bytes"] == sum(inodes.values())
    assert found["stored_bytes"] < sum(each["stored_bytes"] for each in found["steps"]) - (1 << 20)
