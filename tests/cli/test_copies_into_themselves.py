"""Promise: nothing is written into what it is made of, and no run onto the root of a disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest

import ckpt.sync
from ckpt.errors import InvalidArgumentError
from tests.support.command import ckpt_command

STATE = {"w": jnp.arange(100)}


def files(folder: Path) -> list[str]:
    return sorted(str(each.relative_to(folder)) for each in folder.rglob("*"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:
        for step in range(2):
            mgr.save(step, STATE).result()
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("", "sub"),
        ("", "sub/far/below"),
        ("", "0"),
        ("", "/"),
        ("0", "/"),
        ("0", "//"),
        ("0", "0/sub"),
        ("0", "0/default/x"),
        ("0", "0/"),
    ],
)
def test_a_copy_into_its_source_is_refused(run: Path, source: str, target: str) -> None:
    before, top = files(run), sorted(os.listdir("/"))
    goal = target if target.startswith("/") else f"{run}/{target}"
    ran = ckpt_command("cp", run / source, goal)
    assert (ran.status, ran.out) == (2, "")
    assert "Choose a place " in ran.err or "is a checkpoint, and" in ran.err
    assert files(run) == before
    assert sorted(os.listdir("/")) == top


def test_a_link_leads_into_the_source_too(run: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run)
    ran = ckpt_command("cp", run, tmp_path / "link/sub")
    assert ran.status == 2
    assert not (run / "sub").exists()


def test_copies_beside_and_above_are_made(run: Path, tmp_path: Path) -> None:
    assert ckpt_command("cp", run, tmp_path / "run-2").status == 0
    assert ckpt_command("cp", run / "0", run / "best").status == 0
    with ckpt.sync.CheckpointManager(run / "old") as mgr:
        mgr.save(7, STATE).result()
    assert ckpt_command("cp", run / "old", run).status == 0
    assert ckpt.sync.verify(run / "7").ok


CALLS: dict[str, Callable[[Path], object]] = {
    "convert": lambda step: ckpt.sync.convert(step, step / "x"),
    "convert to a step": lambda step: ckpt.sync.convert(step, step, step=5),
    "convert the mean": lambda step: ckpt.sync.convert(
        {step.parent / "1": 0.5, step: 0.5}, step / "x"
    ),
    "export": lambda step: ckpt.sync.convert(step, step / "x.safetensors", format="safetensors"),
    "convert an item": lambda step: ckpt.sync.convert(step / "default", step / "default/x"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_functions_write_nothing_into_their_source(
    run: Path, call: Callable[[Path], object]
) -> None:
    before = files(run)
    with pytest.raises(InvalidArgumentError, match="into the source itself"):
        call(run / "0")
    assert files(run) == before


def test_a_checkpoint_may_be_written_anew_in_its_own_place(run: Path) -> None:
    ckpt.sync.convert(run / "0", run / "0", if_exists="replace")
    assert ckpt.sync.verify(run / "0").ok
