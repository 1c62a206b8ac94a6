"""`ckpt ls` and `show`: what a run and a checkpoint hold."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckpt
from tests.support.command import (
    check_golden,
    ckpt_command,
    environment,
    in_this_process,
    on_terminal,
    settled,
    without_styles,
)

LOOKING = ("ls", "show")


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize(
    "arguments",
    [("ls",), ("show",), ("show", "--summary"), ("show", "params.**")],
    ids=lambda arguments: "_".join(re.sub(r"\W", "", each) for each in arguments),
)
def test_output(arguments: tuple[str, ...], as_json: bool, run_root: Path) -> None:
    command, *rest = arguments
    ran = ckpt_command(command, run_root, *rest, *(["--json"] if as_json else []))
    assert (ran.status, ran.err) == (0, "")
    name = "_".join(re.sub(r"\W", "", each) for each in arguments)
    check_golden(f"{name}_json" if as_json else name, settled(ran.out, root=run_root))
    assert not as_json or ran.json


def test_output_of_a_checkpoint_with_items(items_path: Path) -> None:
    ran = ckpt_command("show", items_path)
    assert (ran.status, ran.err) == (0, "")
    check_golden("show_items", settled(ran.out, path=items_path))


def test_a_pattern_chooses_leaves_of_the_same_record(run_root: Path, items_path: Path) -> None:
    def paths(path: Path, text: str) -> list[str]:
        found = ckpt_command("show", path, text, "--json").json
        return [each["path"] for each in found["leaves"]]

    dense = ["params.dense.bias", "params.dense.kernel"]
    assert paths(run_root, "params.dense") == dense
    assert paths(run_root, "*.*.*") == dense
    assert paths(items_path, "config") == ["layers", "rate"]
    assert paths(items_path, "config:**") == ["layers", "rate"]


def test_the_health_of_steps_is_shown_where_it_is_known(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, {"w": jnp.ones(3)}).result()
    with ckpt.sync.CheckpointManager(tmp_path, extensions=[ckpt.extensions.VitalSigns()]) as mgr:
        mgr.save(2, {"w": jnp.ones(3)}).result()
        mgr.save(3, {"w": jnp.array([1, jnp.nan, jnp.inf]), "b": jnp.full(1, jnp.nan)}).result()
    header, *rows = ckpt_command("ls", tmp_path).out.splitlines()[:4]
    assert header.split()[:4] == ["step", "age", "size", "health"]
    assert "healthy" not in rows[0]
    assert "healthy" in rows[1]
    assert "2 leaves not finite" in rows[2]
    found = ckpt_command("ls", tmp_path, "--json").json["steps"]
    assert [each["nonfinite_leaves"] for each in found] == [None, 0, 2]
    assert [each["unequal_leaves"] for each in found] == [0, 0, 0]
    health = [ckpt_command("show", tmp_path / step).out for step in "123"]
    assert not re.search(r"^health ", health[0], re.MULTILINE)
    assert re.search(r"^health +healthy$", health[1], re.MULTILINE)
    odd = r"^health +NaN or infinite values in b \(1\), w \(2\)$"
    assert re.search(odd, health[2], re.MULTILINE)
    assert ckpt_command("show", tmp_path / "3", "--json").json["nonfinite"] == {"b": 1, "w": 2}
    assert ckpt_command("show", tmp_path / "1", "--json").json["nonfinite"] is None


def test_a_step_may_be_given_by_its_path(run_root: Path) -> None:
    assert ckpt_command("show", run_root / "10", "--json").json["step"] == 10
    assert ckpt_command("show", run_root, "--json").json["step"] == 30
    assert ckpt_command("show", f"file://{run_root}/20", "--json").json["step"] == 20


def test_steps_with_other_names_are_found(tmp_path: Path) -> None:
    names = ckpt.step_names.Standard("ckpt", 8)
    with ckpt.sync.CheckpointManager(tmp_path, step_names=names) as mgr:
        mgr.save(100, {"w": jnp.zeros(2)})
    (tmp_path / "notes_2").mkdir()
    ran = ckpt_command("ls", tmp_path, "--json")
    assert [each["step"] for each in ran.json["steps"]] == [100]
    assert ran.json["steps"][0]["name"] == "ckpt_00000100"
    assert ran.err == ""


def test_an_empty_directory_has_no_steps(tmp_path: Path) -> None:
    ran = ckpt_command("ls", tmp_path)
    assert (ran.status, ran.out) == (0, f"{tmp_path}: no steps\n")


@pytest.mark.parametrize("command", LOOKING)
def test_looking_imports_neither_jax_nor_tensorstore(command: str, run_root: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ckpt", command, str(run_root)],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines()}
    assert "ckpt.cli.app" in imported
    assert not imported & {"jax", "tensorstore", "pydantic"}
    # A list of steps reads the heads of manifests, which takes no arrays either.
    assert ("numpy" in imported) is (command != "ls")


@pytest.mark.parametrize("command", LOOKING)
@pytest.mark.parametrize("columns", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(command: str, columns: int, run_root: Path) -> None:
    link = run_root.parent / "b"
    if not link.exists():
        link.symlink_to(run_root)
    status, shown = on_terminal(command, link, columns=columns)
    assert status == 0
    table = without_styles(shown).splitlines()
    if command == "show":
        # Its texts are whole, however long they are.
        table = table[table.index("") :]
    assert max(map(len, table[:-1])) <= columns
    assert "\x1b[1m" in shown


def test_a_terminal_without_colours_gets_none(run_root: Path) -> None:
    assert "\x1b" not in on_terminal("ls", run_root, NO_COLOR="1")[1]
    assert "\x1b" not in on_terminal("ls", run_root, TERM="dumb")[1]
    assert "\x1b" not in ckpt_command("ls", run_root).out


def test_names_that_the_terminal_cannot_show(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", {"größe\x1b[31m": jnp.zeros(2), "名": 1})
    ran = ckpt_command("show", tmp_path / "x", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert ran.status == 0
    assert ran.out.isascii()
    assert "\x1b" not in ckpt_command("show", tmp_path / "x").out


def test_a_damaged_step_is_named_and_the_others_are_listed(run_root: Path, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    shutil.copytree(run_root, root)
    (root / "30" / "ckpt.json").write_bytes(b"{}")
    ran = ckpt_command("ls", root, "--json")
    assert [each["step"] for each in ran.json["steps"]] == [10, 20]
    assert [each["step"] for each in ran.json["unreadable"]] == [30]
    assert "step 30" in ran.err
    assert ckpt_command("show", root / "30").status == 1


def test_a_root_whose_steps_are_all_damaged_is_not_taken_for_an_empty_one(
    run_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "runs"
    shutil.copytree(run_root, root)
    for manifest in root.glob("*/ckpt.json"):
        manifest.write_bytes(b"{}")
    ran = in_this_process(capsys, "ls", root)
    assert ran.status == 1
    assert "3 steps, none readable" in ran.out
    (tmp_path / "empty").mkdir()
    with ckpt.sync.CheckpointManager(tmp_path / "empty"):
        ran = in_this_process(capsys, "ls", tmp_path / "empty")
    assert (ran.status, "no steps" in ran.out) == (0, True)


def test_without_a_path_the_steps_of_the_current_directory_are_listed(
    run_root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_root)
    here, there = in_this_process(capsys, "ls"), in_this_process(capsys, "ls", run_root)
    assert here.status == 0
    assert settled(here.out, root=run_root) == settled(there.out, root=run_root)


def test_an_item_without_leaves_is_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    items = {"state": {"w": 1}, "text": "hello", "none": {}}
    ckpt.sync.save(tmp_path / "own", items=items)
    with ocp.CheckpointManager(tmp_path / "orbax", item_names=("state", "config")) as orbax:
        state = ocp.args.StandardSave({"w": np.arange(4.0)})
        orbax.save(1, args=ocp.args.Composite(state=state, config=ocp.args.JsonSave({"lr": 1})))
    own = in_this_process(capsys, "show", tmp_path / "own")
    assert re.search(r"^text +an item \(bytes\) +5 B$", own.out, re.MULTILINE)
    assert re.search(r"^none +a tree without leaves$", own.out, re.MULTILINE)
    other = in_this_process(capsys, "show", tmp_path / "orbax" / "1")
    assert re.search(r"^config +an item \(json\) +9 B$", other.out, re.MULTILINE)
    items = in_this_process(capsys, "show", tmp_path / "orbax", "--json").json["items"]
    whole = {"name": "config", "handler": "json", "leaves": 0, "arrays": 0, "nbytes": 9}
    assert whole in items
    assert "config" not in in_this_process(capsys, "show", tmp_path / "orbax", "*").out
    ckpt.sync.save(tmp_path / "empty", {})
    about, leaves = in_this_process(capsys, "show", tmp_path / "empty").out.split("\n\n")
    assert "default (pytree): 0 leaves" in about
    assert leaves.splitlines()[1].split("  ")[0] == "default"
