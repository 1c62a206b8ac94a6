"""Coordinators and settings that cannot be meant: an error that says so before anything is done."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ckpt
from ckpt import errors
from ckpt.coordination import MemoryKeyValues, SingleProcess


def job(index: Any = 0, count: Any = 2, shared: Any = None) -> Any:
    values = MemoryKeyValues() if shared is None else shared
    return SimpleNamespace(process_index=index, process_count=count, key_values=lambda: values)


WRONG = {
    "a number": (3, "coordinator=3: expected a Coordinator such as"),
    "a class": (SingleProcess, r"pass an instance, SingleProcess\(\.\.\.\)"),
    "no process": (job(count=0), "process_count=0: expected a whole number, 1 or more"),
    "true": (job(count=True), "process_count=True: expected"),
    "half a process": (job(count=1.5), "process_count=1.5: expected"),
    "an index too high": (job(2), "process_index=2: expected a whole number from 0 to 1"),
    "an index below 0": (job(-1), "process_index=-1: expected"),
    "no index": (job(None), "process_index=None: expected"),
    "a dict": (job(shared={"a": b"b"}), r"key_values\(\)=\{'a': b'b'\}: expected an object"),
    "a class of values": (job(shared=MemoryKeyValues), r"key_values\(\)=<class"),
}


@pytest.mark.parametrize(("given", "said"), WRONG.values(), ids=WRONG)
def test_a_coordinator_that_is_none_is_refused(tmp_path: Path, given: Any, said: str) -> None:
    root = tmp_path / "root"
    for call in (
        lambda: ckpt.CheckpointManager(root, coordinator=given),
        lambda: ckpt.sync.CheckpointManager(root, coordinator=given),
        lambda: ckpt.sync.save(root, {"w": 1}, coordinator=given),
        lambda: ckpt.sync.load(root, coordinator=given),
        lambda: ckpt.sync.merge({root: 1.0}, coordinator=given),
    ):
        with pytest.raises(errors.InvalidArgumentError, match=said):
            call()
    assert not root.exists()


def test_a_job_of_one_shares_nothing(tmp_path: Path) -> None:
    alone: Any = SimpleNamespace(process_index=0, process_count=1, key_values=list)
    ckpt.sync.save(tmp_path / "one", {"w": 1}, coordinator=alone)
    assert ckpt.sync.load(tmp_path / "one", coordinator=alone) == {"w": 1}


@pytest.mark.parametrize("name", ["timeouts", "staging"])
def test_settings_of_one_save_are_checked(tmp_path: Path, name: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=f"{name}=3: expected a {name.title()}"):
        ckpt.sync.save(tmp_path / "one", {"w": 1}, **{name: 3})  # type: ignore[call-overload]
    assert not (tmp_path / "one").exists()
