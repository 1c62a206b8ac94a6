"""`ckpt ls --long`: the steps of a run, and what it and its parents have begun from."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest

import ckpt
from tests.support.command import check_golden, ckpt_command, in_this_process, settled


def run_from(root: Path, source: Path | None, *steps: int) -> None:
    """Make a run that begins from another one, with these steps."""
    with ckpt.sync.CheckpointManager(root) as mgr:
        _, state = mgr.resume({"w": jnp.zeros(4)}, source=source)
        for step in steps:
            mgr.save(step, state, metrics={"loss": 1 / (1 + step)})


@pytest.fixture
def last(tmp_path: Path) -> Path:
    """Return the root of a run that began from one that began from a third."""
    run_from(tmp_path / "first", None, 1, 2)
    run_from(tmp_path / "second", tmp_path / "first" / "2", 3)
    run_from(tmp_path / "third", tmp_path / "second" / "3", 4, 5)
    return tmp_path / "third"


def test_the_parents_of_parents_are_shown(last: Path) -> None:
    ran = ckpt_command("ls", "--long", last)
    assert (ran.status, ran.err) == (0, "")
    check_golden("ls_long", settled(ran.out, runs=last.parent))
    as_json = ckpt_command("ls", "--long", last / "4", "--json")
    check_golden("ls_long_json", settled(as_json.out, runs=last.parent))
    assert [each["step"] for each in as_json.json["steps"]] == [4]


def test_a_parent_that_is_gone_or_another_one_is_said(last: Path) -> None:
    second = last.parent / "second"
    shutil.rmtree(second / "3")
    run_from(second, None, 3)
    ran = ckpt_command("ls", "--long", last)
    assert ran.out.splitlines()[-2] == (f"begun from {second}/3 (another checkpoint is there now)")
    shutil.rmtree(second)
    [parent] = ckpt_command("ls", "--long", last, "--json").json["ancestors"]
    assert parent["committed"] is None
    assert parent["reason"].startswith("it cannot be read")
    (last.parent / "second").mkdir()
    (second / "3").mkdir()
    (second / "3" / "ckpt.json").write_bytes(b"{}")
    assert ckpt_command("ls", "--long", last).status == 0


def test_a_checkpoint_by_itself_and_an_empty_root(items_path: Path, tmp_path: Path) -> None:
    found = ckpt_command("ls", "--long", items_path, "--json").json
    assert [each["step"] for each in found["steps"]] == [None]
    assert found["ancestors"] == []
    ran = ckpt_command("ls", "--long", tmp_path)
    assert (ran.status, ran.out) == (0, f"{tmp_path}: no steps, begun from scratch\n")
    ran = ckpt_command("ls", "--long", tmp_path / "none")
    assert (ran.status, ran.out) == (2, "")


@pytest.mark.parametrize("place", [b'"writer":{', b'"items":{', b'"process_count":1'])
def test_of_a_damaged_step_nothing_is_told(
    place: bytes, run_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who wrote the steps is read without what they hold; damage is found anywhere."""
    root = Path(shutil.copytree(run_root, tmp_path / "runs"))
    manifest = root / "20" / "ckpt.json"
    data = manifest.read_bytes()
    at = data.index(place) + len(place) - 1
    manifest.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    ran = in_this_process(capsys, "ls", "--long", root)
    assert (ran.status, ran.out) == (1, "")
    assert "step 20" in ran.err


def test_the_contract_of_each_step_is_shown(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for step, run in (
        (1, {"layers": 12, "heads": 8}),
        (2, {"heads": 8, "layers": 12}),
        (3, {"layers": 24, "heads": 8}),
    ):
        contract = ckpt.extensions.Contract(run, on_mismatch="warn")
        with ckpt.sync.CheckpointManager(root, extensions=[contract]) as mgr:
            mgr.save(step, {"w": jnp.zeros(4)})
    with ckpt.sync.CheckpointManager(root) as mgr:
        mgr.save(4, {"w": jnp.zeros(4)})
    shown = [line.split() for line in ckpt_command("show", root / "1").out.splitlines()]
    assert ["contract", '{"heads":8,"layers":12}'] in shown
    assert "\ncontract" not in ckpt_command("show", root / "4").out
    found = ckpt_command("ls", "--long", root, "--json").json["steps"]
    assert [(each["contract"] or {}).get("layers") for each in found] == [12, 12, 24, None]
    one, two, three, four = ckpt_command("ls", "--long", root).out.splitlines()[1:5]
    assert one.split("contract ")[1] == two.split("contract ")[1] != three.split("contract ")[1]
    assert "contract" not in four
    alone = ckpt_command("ls", "--long", root / "3").out
    assert f"contract {three.split('contract ')[1]}" in alone
