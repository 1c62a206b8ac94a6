"""`ckpt convert` and `merge`: checkpoints that are written in other formats, and means."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import ckpt
from tests.cli.test_copying import SLOW, begin
from tests.cli.test_verifying import data_file, flip
from tests.support.command import check_golden, ckpt_command, on_terminal, settled, without_styles


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_output(as_json: bool, run_root: Path, tmp_path: Path) -> None:
    save_file({"w": np.ones((4, 4), np.float32)}, tmp_path / "w.safetensors")
    shown = []
    for arguments in (
        ("convert", run_root / "10", tmp_path / "a"),
        ("convert", run_root, tmp_path / "b", "--step", 5),
        ("convert", run_root, tmp_path / "c", "--to", "orbax"),
        ("convert", run_root, tmp_path / "d.safetensors", "--to", "safetensors", "--at", "params"),
        ("convert", run_root, tmp_path / "e", "--to", "zarr", "--at", "params"),
        ("convert", "--in-place", tmp_path / "w.safetensors", tmp_path / "f"),
        ("convert", "--in-place", tmp_path / "w.safetensors", tmp_path / "g", "--step", 0),
        ("merge", f"{run_root}/10=0.25", f"{run_root}/20=0.75", "--to", tmp_path / "h"),
    ):
        ran = ckpt_command(*arguments, *["--json"] * as_json)
        assert (ran.status, ran.err) == (0, "")
        shown.append(f"$ {arguments[0]}\n{ran.out}")
    text = settled("".join(shown), root=run_root, tmp=tmp_path)
    check_golden(f"convert{'_json' * as_json}", text)
    assert ckpt.sync.verify(tmp_path / "b" / "5").ok
    assert load_file(tmp_path / "d.safetensors")["embed"].shape == (16, 4)
    assert np.array_equal(ckpt.sync.load(tmp_path / "g" / "0")["w"], np.ones((4, 4)))
    assert ckpt.sync.load(tmp_path / "h")["params"]["embed"][0, 0] == 17.5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("merge", "{root}/10=0.5", "{root}/10=0.5", "--to", "{tmp}/x"), "is given twice"),
        (("merge", "{root}=0.5", "{root}/30=0.5", "--to", "{tmp}/x"), "is given twice"),
        (("merge", "{root}/10", "--to", "{tmp}/x"), "expected a path with its weight"),
        (("merge", "{root}/10=nan", "--to", "{tmp}/x"), "expected a path with its weight"),
        (("merge", "--to", "{tmp}/x"), "Missing argument"),
        (("convert", "{root}/10", "{root}/20"), "pass --overwrite to replace"),
        (("convert", "{root}/10", "{tmp}/x", "--to", "hdf5"), "'hdf5' is not one of"),
        (("convert", "{root}/10", "{tmp}/x", "--to", "safetensors"), "\n  epoch: it is"),
        (("convert", "{tmp}/nothing", "{tmp}/x"), "there is no directory"),
        (("convert", "--in-place", "{root}/10", "{tmp}/x"), "is a checkpoint of this library"),
        (("convert", "--in-place", "{tmp}/nothing", "{tmp}/x"), "there is no directory"),
    ],
)
def test_wrong_use(arguments: tuple[str, ...], words: str, run_root: Path, tmp_path: Path) -> None:
    ran = ckpt_command(*(each.format(root=run_root, tmp=tmp_path) for each in arguments))
    assert (ran.status, ran.out) == (2, "")
    assert words in ran.err
    assert "Traceback" not in ran.err
    assert not list(tmp_path.iterdir())


def test_a_damaged_source_is_named(run_root: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(run_root, tmp_path / "runs"))
    flip(*data_file(root / "10"))
    ran = ckpt_command("convert", root / "10", tmp_path / "x")
    assert (ran.status, ran.out) == (1, "")
    assert "params.dense.kernel" in ran.err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("command", ["convert", "merge"])
def test_an_interrupt_leaves_nothing(command: str, run_root: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "x"
    arguments = [f"{run_root}/10", target]
    if command == "merge":
        arguments = [f"{run_root}/10=0.5", f"{run_root}/20=0.5", "--to", target]
    process = begin(command, *arguments, SLOW_READ_SECONDS="2", SLOW_SAYS="reading")
    assert process.stderr is not None
    assert process.stderr.readline() == "reading\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "ckpt: interrupted"
    assert not target.exists()
    assert not target.parent.exists() or not list(target.parent.iterdir())


def test_progress_on_a_terminal(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "a", {"w": np.ones(8 << 20)})
    status, shown = on_terminal("convert", tmp_path / "a", tmp_path / "b", columns=60, program=SLOW)
    assert status == 0
    frames = [each for each in re.split(r"\r|\n", without_styles(shown)) if "left" in each]
    assert frames
    assert max(map(len, frames)) < 60
