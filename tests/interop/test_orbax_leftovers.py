"""What Orbax began and never finished: named, counted, and removed by one command alone."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any, Literal

import anyio
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckpt
import ckpt.sync
from ckpt._inspection.removals import collect
from ckpt.storage import Memory
from ckpt.storage._resolve import open_root
from tests.support.command import ckpt_command

STATE = {"w": np.arange(1000.0)}
DAY = 86_400
TMP = ocp.utils.TMP_DIR_SUFFIX


def names(root: Path) -> list[str]:
    return sorted(each.name for each in root.iterdir())


def age(path: Path, seconds: float) -> None:
    """Make a directory, and all that is in it, so old."""
    then = time.time() - seconds
    for each in [*path.rglob("*"), path]:
        os.utime(each, (then, then))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root of Orbax with the step 5, and three that it has begun, as its versions call them."""
    root = tmp_path / "run"
    with ocp.CheckpointManager(root) as manager:
        for step in (5, 6, 7, 8):
            manager.save(step, args=ocp.args.StandardSave(STATE))
    os.rename(root / "6", root / f"6{TMP}")
    # Killed while it wrote that.
    (root / f"6{TMP}" / "_CHECKPOINT_METADATA").write_text("{")
    os.rename(root / "7", root / f"7{TMP}-1700000000")
    # Years ago, only the item had such a name.
    os.rename(root / "8/default", root / f"8/default{TMP}-1700000000")
    (root / "8/_CHECKPOINT_METADATA").unlink()
    return root


@pytest.mark.parametrize("mode", ["r", "a"])
def test_they_are_named_once_when_the_root_is_opened(
    root: Path, caplog: pytest.LogCaptureFixture, mode: Literal["r", "a"]
) -> None:
    before = names(root)
    with ckpt.sync.CheckpointManager(root, mode=mode) as mgr:
        assert mgr.all_steps() == [5]
        if mode == "a":
            mgr.save(9, STATE, durable=True)
    said = warnings(caplog)
    assert sum(f"6{TMP}, 7{TMP}-1700000000" in line for line in said) == 1
    assert sum("step 8" in line for line in said) == 1
    assert set(before) <= set(names(root))


def test_they_are_counted(root: Path) -> None:
    found = ckpt_command("ls", "--by-size", root, "--json").json["usage"]
    sizes = {each["name"]: each["nbytes"] for each in found["shares"]}
    assert sizes.keys() == {"5", f"6{TMP}", f"7{TMP}-1700000000", "8"}
    assert min(sizes.values()) > 1000
    assert found["nbytes"] == sum(sizes.values())


def test_one_command_removes_them_when_they_are_a_day_old(root: Path) -> None:
    begun = [f"6{TMP}", f"7{TMP}-1700000000", "8"]
    before = names(root)
    for name in before:
        age(root / name, DAY + 60)
    # The directory is old, and one file in it is not.
    (root / begun[1] / "default" / "late").touch()
    for options in ((), ("--wait", "0s"), ("--orbax", "--dry-run")):
        ran = ckpt_command("gc", root, *options)
        assert (ran.status, names(root)) == (0, before)
    ran = ckpt_command("gc", root, "--orbax", "--json")
    assert sorted(each["name"] for each in ran.json["found"]) == [begun[0], begun[2]]
    assert f"Orbax may still write {begun[1]}" in ran.err
    assert names(root) == sorted(set(before) - {begun[0], begun[2]})
    age(root / begun[1], DAY - 60)
    assert f"Orbax may still write {begun[1]}" in ckpt_command("gc", root, "--orbax").err
    age(root / begun[1], DAY + 60)
    assert "begun by Orbax" in ckpt_command("gc", root, "--orbax").out
    assert names(root) == ["5"]
    with ocp.CheckpointManager(root) as manager:
        assert manager.all_steps() == [5]


def test_what_is_finished_and_damaged_is_left(root: Path) -> None:
    (root / "5/_CHECKPOINT_METADATA").write_text("{")
    for name in names(root):
        age(root / name, 2 * DAY)
    assert ckpt_command("gc", root, "--orbax").status == 0
    assert names(root) == ["5"]


@pytest.mark.parametrize("seconds", [DAY + 60, DAY - 60, None])
def test_in_a_store_it_is_when_the_step_was_begun(seconds: float | None) -> None:
    """There a step that is not finished has its name already, and lacks the mark at the end."""
    url = f"memory://orbax-leftovers-{seconds}"
    began = {} if seconds is None else {"init_timestamp_nsecs": int((time.time() - seconds) * 1e9)}
    about: dict[str, Any] = {"item_handlers": {"default": "x"}, **began}

    async def main() -> list[str]:
        storage = open_root(url)
        await storage.prepare()
        for name, data in {
            "_CHECKPOINT_METADATA": json.dumps(about).encode(),
            "default/_METADATA": b'{"tree_metadata": {}}',
            "default/manifest.ocdbt": b"x",
        }.items():
            await storage._keys.put(f"5/{name}", data)  # type: ignore[attr-defined]
        await collect(url, wait=0.0, orbax=False, dry_run=False)
        assert await storage.step_dirs() == ["5"]
        await collect(url, wait=0.0, orbax=True, dry_run=False)
        return await storage.step_dirs()

    with ckpt.sync.CheckpointManager(Memory(url)) as mgr:
        assert mgr.all_steps() == []
    assert anyio.run(main) == ([] if seconds == DAY + 60 else ["5"])
