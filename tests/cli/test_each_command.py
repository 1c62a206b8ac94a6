"""What each command promises, and each of its options, on one small run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import ckpt
import ckpt.sync
from tests.support.command import Ran, in_this_process
from tests.support.manifests import document_of, rewrite

Command = Callable[..., Ran]
Report = Callable[..., Any]
# Bytes of `w`, of `b`, and of both.
W, B = 256, 8
ARRAYS = W + B


def state_of(step: int, b: float = 0.0) -> dict[str, object]:
    params = {"w": np.full((8, 8), step, np.float32), "b": np.full(4, b, np.float16)}
    return {"params": params, "n": step}


def saved(root: Path, **b: float) -> Path:
    """Save the steps 10, 20 and 30; `s30=1` gives `b` of step 30 another value."""
    with ckpt.sync.CheckpointManager(root) as mgr:
        for step in (10, 20, 30):
            metrics, seen = {"loss": 1 / step}, {"seen": step}
            state = state_of(step, b.get(f"s{step}", 0.0))
            mgr.save(step, state, metrics=metrics, custom_metadata=seen)
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return saved(tmp_path / "run")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Command:
    """Return what runs a command in this process."""
    return lambda *arguments: in_this_process(capsys, *arguments)


@pytest.fixture
def report(run: Command) -> Report:
    """Return what runs a command and returns the JSON that it prints."""

    def reported(*arguments: object, status: int = 0) -> Any:
        ran = run(*arguments, "--json")
        assert ran.status == status, ran.err
        return ran.json

    return reported


def steps(root: Path) -> list[int]:
    return sorted(int(each.name) for each in root.iterdir() if each.name.isdigit())


def column(rows: list[dict[str, Any]], name: str) -> list[Any]:
    return [row[name] for row in rows]


def files(folder: Path) -> list[Path]:
    return [each for each in folder.rglob("*") if each.is_file()]


def damage(step: Path) -> None:
    """Put zeros into the largest data file, which stays as long as it is."""
    data = max(files(step / "default" / "d"), key=lambda each: each.stat().st_size)
    data.write_bytes(bytes(data.stat().st_size))


def test_convert_in_place(tmp_path: Path, run: Command, report: Report) -> None:
    source, target = tmp_path / "model.safetensors", tmp_path / "adopted"
    safetensors.numpy.save_file({"w": np.ones((2, 2), np.float32)}, source)
    ran = run("convert", source, target, "--in-place")
    assert (ran.status, ran.out) == (0, f"{target}: 16 B of arrays stay in {source}\n")
    assert (np.asarray(ckpt.sync.load(target)["w"]) == 1).all()
    safetensors.numpy.save_file({"w": np.full((2, 2), 2, np.float32)}, source)
    assert run("convert", source, target, "--in-place").status == 2
    assert report("convert", source, target, "--in-place", "--overwrite")["nbytes"] == 16
    assert (np.asarray(ckpt.sync.load(target)["w"]) == 2).all()
    for options in ("--to", "zarr"), ("--at", "w"):
        assert run("convert", source, tmp_path / "no", "--in-place", *options).status == 2
    assert not (tmp_path / "no").exists()


def test_bisect(tmp_path: Path, root: Path, run: Command, report: Report) -> None:
    other = saved(tmp_path / "other", s30=1.0)
    ran = run("bisect", root, other)
    assert ran.status == 1
    assert ran.out.startswith("last same step   20\nfirst different  30\n")
    found = report("bisect", root, other, status=1)
    assert (found["last_same"], found["first_different"]) == (20, 30)
    assert [each["leaf"]["path"] for each in found["differences"]["contents"]] == ["params.b"]
    assert report("bisect", root, root)["is_same"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, run: Command) -> None:
    ran = run("completion", shell)
    assert (ran.status, f"_CKPT_COMPLETE={shell}_complete" in ran.out) == (0, True)


def test_convert(tmp_path: Path, root: Path, run: Command, report: Report) -> None:
    target = tmp_path / "model.safetensors"
    options = ("--to", "safetensors", "--at", "params")
    assert run("convert", root, target, *options).status == 0
    assert (safetensors.numpy.load_file(target)["w"] == 30).all()
    assert run("convert", root / "10", target, *options).status == 2
    found = report("convert", root / "10", target, *options, "--overwrite")
    assert (found["format"], found["arrays"], found["nbytes"]) == ("safetensors", 2, ARRAYS)
    assert (safetensors.numpy.load_file(target)["w"] == 10).all()


def test_cp(tmp_path: Path, root: Path, run: Command, report: Report) -> None:
    target = tmp_path / "copies"
    assert run("cp", root / "10", target / "10").status == 0
    found = report("cp", root, target, "--follow", "--until", "20")
    assert column(found["steps"], "outcome") == ["there", "copied"]
    found = report("cp", root, target)
    assert column(found["steps"], "outcome") == ["there", "there", "copied"]
    # Without --verify, bytes are not read; with it, damage is replaced.
    damage(target / "10")
    assert column(report("cp", root, target)["steps"], "outcome")[0] == "there"
    assert run("verify", target).status == 1
    report("cp", root, target, "--verify")
    assert run("verify", target).status == 0
    other = saved(tmp_path / "other", s30=1.0)
    assert run("cp", other, target).status == 2
    assert column(report("cp", other, target, "--overwrite")["steps"], "outcome") == ["copied"] * 3
    assert (ckpt.sync.load(target / "30")["params"]["b"] == 1).all()


def test_cp_of_parts(tmp_path: Path, root: Path, report: Report) -> None:
    found = report("cp", root / "30", tmp_path / "part", "--select", "params.w")
    assert found["nbytes"] == W
    part = ckpt.sync.load(tmp_path / "part")
    assert {branch: list(leaves) for branch, leaves in part.items()} == {"params": ["w"]}


def test_cp_of_virtual_steps(tmp_path: Path, report: Report) -> None:
    source = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"w": np.ones((2, 2), np.float32)}, source)
    ckpt.sync.adopt(source, tmp_path / "virtual")
    (virtual,) = report("cp", tmp_path / "virtual", tmp_path / "copy")["steps"]
    (whole,) = report("cp", tmp_path / "virtual", tmp_path / "whole", "--whole")["steps"]
    assert (virtual["is_virtual"], whole["is_virtual"]) == (True, False)
    source.unlink()
    assert (np.asarray(ckpt.sync.load(tmp_path / "whole")["w"]) == 1).all()


def test_diff(root: Path, run: Command, report: Report) -> None:
    ran = run("diff", root / "10", root / "20")
    assert ran.status == 1
    assert ran.out.endswith("2 changed, 1 the same\n")
    found = report("diff", root / "10", root / "20", "--values", status=1)
    assert found["metrics"] == [{"item": "", "name": "loss", "before": "0.1", "after": "0.05"}]
    (change,) = column(found["contents"], "change")
    assert (change["max"], change["mean"], change["different"]) == (10, 10, 64)
    found = report("diff", root / "10", root / "20", status=1)
    assert column(found["contents"], "change") == [None]
    assert run("diff", root / "10", root / "10").status == 0


def test_doctor(root: Path, run: Command, report: Report) -> None:
    before = steps(root)
    ran = run("doctor", root)
    found = report("doctor", root, status=ran.status)
    assert found["path"] == str(root)
    software = {each["name"]: each["found"] for each in found["findings"]}
    assert software["numpy"] == np.__version__
    assert f"numpy ok {np.__version__}" in " ".join(ran.out.split())
    assert steps(root) == before


def test_ls_by_size(root: Path, run: Command, report: Report) -> None:
    ran = run("ls", root, "--by-size")
    assert (ran.status, ran.out.split("\n")[0].split()) == (0, ["step", "size", "share", "files"])
    total = sum(each.stat().st_size for step in (10, 20, 30) for each in files(root / str(step)))
    found = report("ls", root, "--by-size")["usage"]
    assert (found["by"], found["nbytes"]) == ("step", total)
    found = report("ls", root, "--by", "dtype")["usage"]
    shares = {each["name"]: each["nbytes"] for each in found["shares"]}
    assert shares == {"float32": 3 * W, "float16": 3 * B, "(other files)": total - 3 * ARRAYS}
    assert report("ls", root)["usage"] is None


KEPT = {
    ("--keep-last", "2"): [30, 40],
    ("--keep-every", "20"): [20, 40],
    ("--keep-best", "loss:max"): [10, 40],
    ("--keep-hourly",): [10, 20, 30, 40],
    ("--keep-daily",): [10, 30, 40],
    ("--keep-weekly",): [10, 40],
    ("--keep-within", "2d"): [40],
    ("--keep-within", "15d"): [10, 20, 30, 40],
    ("--keep-step", "20"): [20, 40],
}


def test_rm_by_policies(root: Path, run: Command, report: Report) -> None:
    with ckpt.sync.CheckpointManager(root) as mgr:
        mgr.save(40, state_of(40), metrics={"loss": 0.0})
    # The week before this one has the steps 10 and 20, two hours apart, and 30 a day after them.
    week = 7 * 86_400
    began = (time.time() // week - 1) * week
    for step, saved_at in (10, began + 7200), (20, began + 14_400), (30, began + 100_000):
        times = dict.fromkeys(("created_ns", "committed_ns"), int(saved_at * 1e9))
        rewrite(root / str(step), document_of(root / str(step)) | times)
    kept = {}
    for options in KEPT:
        found = report("rm", root, *options, "--dry-run")
        kept[options] = [each["step"] for each in found["steps"] if not each["goes"]]
    assert kept == KEPT
    assert steps(root) == [10, 20, 30, 40]
    assert run("rm", root, "--keep-every", "20", "--trash", "bin").status == 0
    assert (steps(root), steps(root / "bin")) == ([20, 40], [10, 30])


def test_ls_long(root: Path, tmp_path: Path, run: Command, report: Report) -> None:
    with ckpt.sync.CheckpointManager(tmp_path / "next") as mgr:
        mgr.resume(lambda: state_of(0), source=root / "20")
        mgr.save(1, state_of(1))
    ran = run("ls", "--long", tmp_path / "next")
    assert (ran.status, f"begun from {root}/20, " in ran.out) == (0, True)
    found = report("ls", root, "--long")
    assert column(found["steps"], "metrics") == [{"loss": 1 / step} for step in (10, 20, 30)]
    assert {each["versions"]["numpy"] for each in found["steps"]} == {np.__version__}
    assert set(column(report("ls", root)["steps"], "process_count")) == {None}


def test_merge(root: Path, tmp_path: Path, run: Command, report: Report) -> None:
    target = tmp_path / "mean"
    given = (f"{root}/10=0.25", f"{root}/30=0.75", "--to", target)
    ran = run("merge", *given)
    assert (ran.status, ran.out.startswith(f"{target}: 2 arrays, {ARRAYS} B")) == (0, True)
    assert (ckpt.sync.load(target)["params"]["w"] == 25).all()
    given = (f"{root}/10=0.5", f"{root}/20=0.5", "--to", target)
    assert run("merge", *given).status == 2
    report("merge", *given, "--overwrite")
    assert (ckpt.sync.load(target)["params"]["w"] == 15).all()


def test_pins_deletions_and_the_trash(root: Path, run: Command, report: Report) -> None:
    assert report("pin", root)["name"] == "keep"
    assert run("pin", root / "10", "best").out == f"{root}: pinned 10 as best\n"
    assert run("rm", root / "30").status == 2
    assert report("pin", root, "--remove")["steps"] == [30]
    assert run("pin", root / "10", "best", "--remove").status == 0
    assert report("rm", root / "30", "--dry-run")["done"] is False
    assert steps(root) == [10, 20, 30]
    assert report("rm", root / "30", "--trash", "bin")["steps"][0]["trash"] == "bin"
    assert run("trash", root).out == "the trash is empty\n"
    in_bin = (root, "--trash", "bin")
    assert column(report("trash", *in_bin), "step") == [30]
    assert column(report("trash", *in_bin, "--empty", "0s", "--dry-run"), "goes") == [True]
    assert run("trash", *in_bin, "--restore", 30).status == 0
    assert steps(root) == [10, 20, 30]
    assert run("rm", root / "30").out.startswith(f"deleted: {root}/30")
    assert steps(root) == [10, 20]
    assert run("rm", root / "20", "--trash", "bin").status == 0
    assert column(report("trash", *in_bin, "--empty", "0s"), "removed") == [True]
    assert report("trash", *in_bin) == []


def test_gc(root: Path, run: Command, report: Report) -> None:
    begun = root / "40.orbax-checkpoint-tmp"
    begun.mkdir()
    (begun / "array").write_bytes(bytes(100))
    two_days_ago = time.time() - 2 * 86_400
    for each in (begun / "array", begun):
        os.utime(each, (two_days_ago, two_days_ago))
    found = report("gc", root, "--orbax", "--dry-run")
    assert (column(found["found"], "name"), found["done"]) == ([begun.name], False)
    assert begun.exists()
    assert run("gc", root, "--orbax").status == 0
    assert not begun.exists()


def test_ui_opens_the_browser(root: Path, run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def look(url: str, *_: object) -> None:
        opened.append(url)
        raise KeyboardInterrupt

    monkeypatch.setattr("webbrowser.open", look)
    ran = run("ui", root, "--open")
    assert ran.status == 130
    assert opened == [ran.out.split()[0]]


def test_deletions_for_good(root: Path, run: Command) -> None:
    with ckpt.sync.CheckpointManager(root, trash="bin") as mgr:
        mgr.save(40, state_of(40))
    for paths in (root / "10",), (root, "--keep-last", 1):
        assert run("rm", *paths, "--for-good").status == 0
    assert steps(root) == [40]
    assert not (root / "bin").exists() or not steps(root / "bin")


def test_show(root: Path, run: Command, report: Report) -> None:
    ran = run("show", root / "20", "params.w[0, :2]")
    assert (ran.status, "[20., 20.]" in ran.out) == (0, True)
    found = report("show", root, "params.w")
    assert (found["values"], found["statistics"]["mean"]) == ([[30.0] * 8] * 8, 30)


def test_stats(root: Path, run: Command, report: Report) -> None:
    ran = run("stats", root)
    assert (ran.status, ran.out.endswith(f"{root}: 3 steps\n")) == (0, True)
    (last,) = report("stats", root, "--last", 1)["steps"]
    with ckpt.sync.CheckpointManager(root) as mgr:
        times = mgr.metadata(30).info.statistics
    assert times is not None
    assert (last["step"], last["blocked"], last["written"]) == (30, times.blocked, times.written)


def test_show_of_a_checkpoint(root: Path, run: Command, report: Report) -> None:
    assert run("show", root, "--summary").out.startswith(f"{root}/30: 3 leaves, 2 arrays, 264 B")
    assert run("show", root, "--summary").out.count("\n") == 1
    leaves = report("show", root / "20")["leaves"]
    assert {each["path"]: each["dtype"] or each["value"] for each in leaves} == {
        "params.b": "float16",
        "params.w": "float32",
        "n": "20",
    }
    assert column(report("ls", root)["steps"], "metrics")[1] == {"loss": 0.05}


def test_verify(root: Path, run: Command, report: Report) -> None:
    whole = report("verify", root)
    assert (whole["ok"], whole["deep"], whole["unread_files"]) == (True, True, 0)
    damage(root / "20")
    ran = run("verify", root)
    assert (ran.status, f"{root}/20" in ran.out) == (1, True)
    assert [each["ok"] for each in report("verify", root, status=1)["steps"]] == [True, False, True]
    shallow = report("verify", root, "--shallow")
    assert (shallow["ok"], shallow["deep"]) == (True, False)
    assert report("verify", root, "--timeout", "0s")["unread_files"] > 0
    half = ("verify", root / "10", "--sample", "50%", "--seed")
    some = report(*half, 3)
    assert (some["seed"], 0 < some["unread_files"] < some["files"]) == (3, True)
    assert report(*half, 3)["unread_nbytes"] == some["unread_nbytes"]


def test_watch(root: Path, run: Command) -> None:
    ran = run("watch", root, "--after", 10, "--until", 30, "--json")
    assert (ran.status, column([json.loads(e) for e in ran.out.splitlines()], "step")) == (
        0,
        [20, 30],
    )
    ran = run("watch", root, "--until", 99, "--timeout", "1ms", "--every", "1ms")
    assert (ran.status, ran.out.count("\n")) == (1, 0)
