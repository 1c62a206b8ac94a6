"""`ckpt verify`: what it reports of checkpoints and roots, and what it says it has not read."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import save_file

import ckpt
from ckpt._format.manifest import decode
from tests.support.command import (
    check_golden,
    ckpt_command,
    environment,
    on_terminal,
    settled,
    without_styles,
)

SLOW = "tests.support.slow_command"


@pytest.fixture
def root(run_root: Path, tmp_path: Path) -> Path:
    """A copy of the root, to be damaged."""
    return Path(shutil.copytree(run_root, tmp_path / "runs"))


def data_file(step: Path) -> tuple[Path, int]:
    """A file that holds arrays, and where one begins."""
    item = decode((step / "ckpt.json").read_bytes(), where="x").items["default"]
    leaf = next(each for each in item.leaves if each.name == "params.dense.kernel")
    return step / "default" / item.data_files[leaf.files[0] if leaf.files else 0], leaf.offsets[0]


def flip(file: Path, byte: int) -> None:
    data = bytearray(file.read_bytes())
    data[byte] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("what", ["root", "step", "shallow"])
def test_output(what: str, as_json: bool, run_root: Path) -> None:
    path = run_root / "10" if what == "step" else run_root
    options = ["--json"] * as_json + ["--shallow"] * (what == "shallow")
    ran = ckpt_command("verify", path, *options)
    assert (ran.status, ran.err) == (0, "")
    check_golden(f"verify_{what}{'_json' * as_json}", settled(ran.out, root=run_root))


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_damage_is_named_line_by_line(as_json: bool, root: Path) -> None:
    flip(*data_file(root / "10"))
    (root / "20" / "default" / "_METADATA").unlink()
    (root / "30" / "ckpt.json").write_bytes(b"{}")
    (root / "30" / "stray").write_text("x")
    ran = ckpt_command("verify", root, *["--json"] * as_json)
    assert ran.status == 1
    assert "step 30 is damaged" in ran.err
    check_golden(f"verify_damaged{'_json' * as_json}", settled(ran.out, root=root))
    if as_json:
        assert [step["ok"] for step in ran.json["steps"]] == [False, False, False]
        hit = {problem["leaf"] for problem in ran.json["steps"][0]["problems"]}
        assert hit == {"params.dense.kernel"}
    assert ckpt_command("verify", root / "30").status == 1


def test_a_step_that_lost_its_manifest_is_damaged(root: Path) -> None:
    (root / "20" / "ckpt.json").unlink()
    ran = ckpt_command("verify", root, "--json")
    assert ran.status == 1
    assert [step["ok"] for step in ran.json["steps"]] == [True, False, True]
    assert "has lost ckpt.json" in ran.json["steps"][1]["problems"][0]["message"]
    assert ran.json["skipped"] == []


def test_a_sample_says_what_was_read(run_root: Path) -> None:
    first = ckpt_command("verify", run_root, "--sample", "20%", "--json").json
    again = ckpt_command("verify", run_root, "--sample", "0.2", "--seed", first["seed"], "--json")
    assert again.json["seed"] == first["seed"]
    for name in ("nbytes", "unread_nbytes", "unread_files"):
        assert again.json[name] == first[name] > 0
    whole = ckpt_command("verify", run_root, "--json").json
    assert whole["seed"] is None
    assert first["nbytes"] + first["unread_nbytes"] == whole["nbytes"]
    assert first["files"] == whole["files"]
    read, total = first["files"] - first["unread_files"], first["files"]
    shown = ckpt_command("verify", run_root, "--sample", "20%", "--seed", first["seed"]).out
    assert f"nothing is wrong in what was read ({read} of {total} files read, " in shown
    assert "whole" not in shown
    assert f"--seed {first['seed']}\n" in shown


def test_a_deadline_says_what_was_left(root: Path) -> None:
    # What is seen without reading is found even so.
    (root / "10" / "default" / "_METADATA").unlink()
    found = ckpt_command("verify", root, "--timeout", "0s", "--json")
    assert found.status == 1
    assert found.json["nbytes"] == 0
    assert found.json["files"] - found.json["unread_files"] == 4  # the manifests, and the lost one
    ran = ckpt_command("verify", root, "--timeout", "0", "--shallow")
    assert (ran.status, ran.out) == (2, "")
    assert ckpt_command("verify", root, "--timeout", "1h", "--json").json["unread_files"] == 0


@pytest.mark.parametrize(
    "options",
    [("--sample", "0"), ("--sample", "101%"), ("--sample", "x"), ("--timeout", "5 years")],
)
def test_wrong_options(options: tuple[str, str], run_root: Path) -> None:
    ran = ckpt_command("verify", run_root, *options)
    assert (ran.status, ran.out) == (2, "")
    assert "expected a" in ran.err
    assert len(ran.err.splitlines()) == 1


def test_what_has_no_digests_is_told(root: Path, tmp_path: Path) -> None:
    with ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions()) as mgr:
        mgr.save(40, args=ocp.args.StandardSave({"w": np.ones(3)}))
    ran = ckpt_command("verify", root)
    assert ran.status == 0
    assert "step 40 was not verified: Orbax wrote it, without digests\n" in ran.out
    ran = ckpt_command("verify", root / "40")
    assert (ran.status, ran.out) == (2, "")
    assert "is a checkpoint of Orbax" in ran.err
    assert ckpt_command("verify", tmp_path / "nothing").status == 2


def test_a_store_that_cannot_be_reached() -> None:
    began = time.monotonic()
    ran = ckpt_command(
        "verify",
        "s3://bucket/run",
        AWS_ENDPOINT_URL="http://127.0.0.1:9",
        AWS_ACCESS_KEY_ID="a",
        AWS_SECRET_ACCESS_KEY="b",
        AWS_REGION="us-east-1",
    )
    assert ran.status == 3
    assert time.monotonic() - began < 60
    assert len(ran.err.splitlines()) == 1


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_progress_on_a_terminal(columns: int, run_root: Path) -> None:
    status, shown = on_terminal("verify", run_root, columns=columns, program=SLOW)
    assert status == 0
    frames = [each for each in re.split(r"\r|\n", without_styles(shown)) if "left" in each]
    assert frames
    assert max(map(len, frames)) < columns
    for each in frames:
        assert re.search(r"\d+%.* [\d.]+ (B|KiB)/s  \d:\d\d:\d\d left$", each), each
    assert any("verify step 20 (2 of 3)" in each for each in frames) is (columns > 40)
    assert any("\u2501" in each for each in frames) is (columns > 40)
    # What stays on the screen is the output alone.
    assert without_styles(re.sub(r"[^\n]*\r\x1b\[K", "", shown)).startswith(
        f"{run_root}/10 is whole"
    )


def test_progress_on_a_terminal_without_unicode(run_root: Path) -> None:
    status, shown = on_terminal(
        "verify", run_root, program=SLOW, PYTHONIOENCODING="ascii", PYTHONUTF8="0"
    )
    assert status == 0
    assert shown.isascii()
    assert "-----" in shown


def test_no_progress_elsewhere(run_root: Path) -> None:
    assert "left" not in on_terminal("verify", run_root, program=SLOW, TERM="dumb")[1]
    ran = subprocess.run(
        [sys.executable, "-m", SLOW, "verify", str(run_root)],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=True,
    )
    assert ran.stderr == ""


def test_an_interrupt_ends_it_with_one_line(run_root: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", SLOW, "verify", str(run_root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment({"SLOW_READ_SECONDS": "0.5"}),
    )
    assert process.stdout is not None
    assert "is whole" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "ckpt: interrupted\n")


def test_a_virtual_step_keeps_no_digests_of_a_sample(tmp_path: Path) -> None:
    save_file({"a": np.ones(1000, "f4"), "b": np.zeros(1000, "f4")}, tmp_path / "m.safetensors")
    ckpt.sync.adopt(tmp_path / "m.safetensors", tmp_path / "base")
    ran = ckpt_command("verify", tmp_path / "base", "--timeout", "0s")
    assert ran.status == 0
    assert "no digests yet: 2 arrays" in ran.out
    assert "2 arrays had no digests yet" in ckpt_command("verify", tmp_path / "base").out
