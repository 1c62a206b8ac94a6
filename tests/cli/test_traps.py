"""What would be easy to get wrong: steps that are not shown, texts that act, output that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import ckpt
from ckpt.step_names import Standard
from tests.support.command import ckpt_command, environment, on_terminal


@pytest.fixture
def doubled(tmp_path: Path) -> Path:
    """Return a root in which two kinds of names have the same numbers."""
    for prefix in ("disc", "gen"):
        with ckpt.sync.CheckpointManager(tmp_path / "two", step_names=Standard(prefix)) as mgr:
            for step in (1, 2):
                mgr.save(step, {"w": jnp.zeros(2)})
    return tmp_path / "two"


def test_rm_deletes_no_step_that_it_cannot_show(doubled: Path) -> None:
    before = sorted(os.listdir(doubled))
    ran = ckpt_command("rm", doubled, "--keep-last", "1")
    assert ran.status == 2
    assert "disc_1 and gen_1" in ran.err
    assert sorted(os.listdir(doubled)) == before


def test_cp_leaves_out_no_step_in_silence(doubled: Path, tmp_path: Path) -> None:
    ran = ckpt_command("cp", doubled, tmp_path / "copy")
    assert ran.status == 2
    assert "disc_1 and gen_1" in ran.err
    assert not (tmp_path / "copy").exists()
    # A single one can be copied.
    assert ckpt_command("cp", doubled / "gen_1", f"{tmp_path}/copy/").status == 0


def test_ls_says_that_there_are_several_steps_of_one_number(doubled: Path) -> None:
    assert "disc_1, gen_1" in ckpt_command("ls", doubled).err


@pytest.fixture
def with_trash(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    with ckpt.sync.CheckpointManager(root, keep=9, trash="trash") as mgr:
        for step in (1, 2):
            mgr.save(step, {"w": jnp.zeros(2)})
    return root


@pytest.mark.parametrize("call", [("rm", "STEP"), ("rm", "ROOT", "--keep-last", "1")])
def test_what_goes_to_a_trash_is_not_deleted_for_good(
    call: tuple[str, ...], with_trash: Path
) -> None:
    note = with_trash / ".ckpt-run" / "preservation.json"
    whole = note.read_bytes()
    arguments = [{"STEP": str(with_trash / "1"), "ROOT": str(with_trash)}.get(a, a) for a in call]
    note.write_bytes(whole[:40])
    ran = ckpt_command(*arguments)
    assert ran.status == 2
    assert "--for-good" in ran.err
    assert (with_trash / "1").exists()
    # A later version may say more.
    told = json.loads(whole)
    told["deletion"]["days"] = 7
    note.write_text(json.dumps(told))
    assert ckpt_command(*arguments).status == 0
    assert (with_trash / "trash" / "1").exists()


def saved(root: Path, *steps: int, value: float = 0.0) -> Path:
    with ckpt.sync.CheckpointManager(root) as mgr:
        for step in steps:
            mgr.save(step, {"w": jnp.full(4, value)})
    return root


@pytest.mark.parametrize("source", ["", "/2"])
def test_cp_replaces_no_step_that_is_pinned(source: str, tmp_path: Path) -> None:
    one, two = saved(tmp_path / "a", 1, 2), saved(tmp_path / "b", 2, value=1.0)
    with ckpt.sync.CheckpointManager(two) as mgr:
        mgr.pin(2, "best")
    ran = ckpt_command("cp", f"{one}{source}", two if not source else f"{two}/", "--overwrite")
    assert ran.status == 2
    assert "best" in ran.err
    assert float(ckpt.sync.load(two / "2")["w"][0]) == 1.0
    assert not (two / "1").exists()


def test_cp_gives_no_step_the_name_of_another(tmp_path: Path) -> None:
    one, two = saved(tmp_path / "a", 1), saved(tmp_path / "b", 3)
    assert ckpt_command("cp", one / "1", two / "model_7").status == 2
    saved(two, 1)
    ran = ckpt_command("cp", one / "1", two / "step_1")
    assert ran.status == 2
    assert sorted(p.name for p in two.iterdir() if p.name[0] != "." and p.name != "metadata") == [
        "1",
        "3",
    ]


def test_log_asks_no_store_that_a_manifest_names(tmp_path: Path) -> None:
    source = saved(tmp_path / "a", 1)
    with ckpt.sync.CheckpointManager(tmp_path / "b") as mgr:
        _, state = mgr.resume({"w": jnp.zeros(4)}, source=source / "1")
        mgr.save(1, state)
    path = tmp_path / "b" / "1" / "ckpt.json"
    manifest = ckpt.manifest.decode(path.read_bytes(), where="")
    import msgspec

    parent = ckpt.manifest.Parent("s3://somebody/1", 1, "0" * 32)
    path.write_bytes(ckpt.manifest.encode(msgspec.structs.replace(manifest, parent=parent)))
    ran = ckpt_command("ls", "--long", tmp_path / "b")
    assert ran.status == 0
    assert "in another store" in ran.out


def test_names_of_metrics_cannot_change_the_terminal(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, {"w": jnp.zeros(2)}, metrics={"\x1b[31mloss": 1.0})
    assert "\x1b[31m" not in on_terminal("ls", tmp_path)[1]


def test_output_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    root = saved(tmp_path / "a", 1)
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "ckpt", "show", str(root)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            timeout=60,
            check=False,
        )
    assert ran.returncode == 3
    assert ran.stderr.startswith("ckpt: the output cannot be written")
    assert len(ran.stderr.splitlines()) == 1


@pytest.mark.parametrize("call", [("ls", "--json"), ("show", "--json")])
def test_a_path_that_is_not_text_is_escaped(call: tuple[str, ...], tmp_path: Path) -> None:
    root = saved(tmp_path / "a", 1)
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/ro\xff"))
    root.rename(odd)
    ran = ckpt_command(*call, odd)
    assert (ran.status, ran.err) == (0, "")
    assert "\\udcff" in ran.out


def test_a_very_large_integer_is_shown(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", {"big": 10**5000})
    ran = ckpt_command("show", tmp_path / "x", "big")
    assert ran.status == 0
    assert "0x" in ran.out
