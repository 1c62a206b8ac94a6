"""How the directories of steps are called, and what a root with several kinds of names is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt
import ckpt.sync
from ckpt import errors, step_names
from ckpt.step_names import Composite, Standard, checked

STEPS = st.integers(0, 10**19 - 1)
PREFIXES = st.sampled_from(["", "ckpt", "step", "a_1", "x-y.z"])
DIGITS = st.integers(0, 19)


def plain(root: Path, **settings: Any) -> ckpt.sync.CheckpointManager:
    return ckpt.sync.CheckpointManager(root, **settings)


def entries(root: Path) -> list[str]:
    return sorted(set(os.listdir(root)) - {".ckpt-run"})


@given(PREFIXES, DIGITS, STEPS)
def test_a_name_is_read_as_the_step_it_was_made_of(prefix: str, digits: int, step: int) -> None:
    names = checked(Standard(prefix, digits))
    assert names.step(names.name(step)) == step


@given(PREFIXES, DIGITS, STEPS, st.text(max_size=30))
def test_no_step_has_two_names(prefix: str, digits: int, step: int, other: str) -> None:
    names = Standard(prefix, digits)
    for name in (other, f"0{step}", f"{step} ", f"{prefix}_{step}", f"{prefix}{step}", f"{step}\n"):
        read = names.step(name)
        assert read is None or names.name(read) == name


@given(STEPS)
def test_names_are_those_of_orbax(step: int) -> None:
    for prefix, digits in (("", 0), ("", 8), ("ckpt", 0), ("ckpt", 8)):
        theirs = ocp.path.step.standard_name_format(
            step_prefix=prefix or None, step_format_fixed_length=digits or None
        )
        assert Standard(prefix, digits).name(step) == theirs.build_name(step)


@pytest.mark.parametrize("names", [Standard("ckpt", 8), Standard("", 6), Standard("run-1")])
def test_a_root_with_other_names_does_everything(tmp_path: Path, names: Standard) -> None:
    with plain(tmp_path, step_names=names, keep=ckpt.keep.Latest(2)) as mgr:
        for step in (1, 20, 300):
            mgr.save(step, {"n": step}, metrics={"loss": float(step)}).result()
        mgr.save(300, {"n": -300}, if_exists="replace").result()
        mgr.wait_until_finished()
        assert entries(tmp_path) == sorted(map(names.name, (20, 300)))
        assert mgr.all_steps() == [20, 300]
        assert mgr.latest_step() == 300
        assert mgr.restore() == {"n": -300}
        assert mgr.restore(20) == {"n": 20}
        assert mgr.metrics(20) == {"loss": 20.0}
        assert mgr.metadata(20).info.path == f"{tmp_path}/{names.name(20)}"
        assert mgr.verify(20)
        assert mgr.best_step("loss", "min") == 20
        with pytest.raises(errors.StepExistsError):
            mgr.save(20, {"n": 0})
        with pytest.raises(errors.StepNotFoundError, match="20, 300"):
            mgr.restore(1)
        mgr.delete(20)
        assert entries(tmp_path) == [names.name(300)]
    assert ckpt.sync.load(tmp_path / names.name(300)) == {"n": -300}
    with plain(tmp_path) as mgr:
        # A manager that looks for other names does not see them.
        assert mgr.all_steps() == ([] if names.name(300) != "300" else [300])


def test_orbax_reads_a_root_with_its_own_names(tmp_path: Path) -> None:
    with plain(tmp_path, step_names=Standard("ckpt", 8)) as mgr:
        mgr.save(5, {"w": np.arange(6.0)}).result()
    options = ocp.CheckpointManagerOptions(step_prefix="ckpt", step_format_fixed_length=8)
    with ocp.CheckpointManager(tmp_path, options=options) as theirs:
        assert theirs.all_steps() == [5]


def test_a_root_may_change_over_to_other_names(tmp_path: Path) -> None:
    with plain(tmp_path) as mgr:
        for step in (1, 2, 3):
            mgr.save(step, {"n": step}).result()
    both = Composite(Standard("ckpt", 4), Standard())
    with plain(tmp_path, step_names=both) as mgr:
        assert mgr.all_steps() == [1, 2, 3]
        mgr.save(4, {"n": 4}).result()
        assert entries(tmp_path) == ["1", "2", "3", "ckpt_0004"]
        assert mgr.all_steps() == [1, 2, 3, 4]
        assert mgr.restore(2) == {"n": 2}
        # A step is one step, whatever its name.
        with pytest.raises(errors.StepExistsError):
            mgr.save(2, {"n": -2})
        mgr.save(2, {"n": -2}, if_exists="replace").result()
        mgr.wait_until_finished()
        assert entries(tmp_path) == ["1", "3", "ckpt_0002", "ckpt_0004"]
        assert mgr.restore(2) == {"n": -2}
        mgr.delete(1)
        assert mgr.all_steps() == [2, 3, 4]


def test_a_step_under_two_names_is_the_one_written_now_and_deleted_under_both(
    tmp_path: Path,
) -> None:
    with plain(tmp_path) as mgr:
        mgr.save(7, {"n": "old"}).result()
    with plain(tmp_path, step_names=Standard("ckpt")) as mgr:
        mgr.save(7, {"n": "new"}).result()
    with plain(tmp_path, step_names=Composite(Standard("ckpt"), Standard())) as mgr:
        assert mgr.all_steps() == [7]
        assert mgr.restore(7) == mgr.restore() == {"n": "new"}
        mgr.delete(7)
        assert mgr.all_steps() == []
        assert entries(tmp_path) == []


def test_names_of_ones_own(tmp_path: Path) -> None:
    class Epochs(step_names.StepNames):
        """A hundred steps are an epoch."""

        def name(self, step: int) -> str:
            return f"epoch{step // 100}-step{step % 100}"

        def step(self, name: str) -> int | None:
            epoch, _, step = name.removeprefix("epoch").partition("-step")
            return int(epoch) * 100 + int(step) if epoch.isdigit() and step.isdigit() else None

    with plain(tmp_path, step_names=Epochs()) as mgr:
        mgr.save(250, {"n": 1}).result()
        assert entries(tmp_path) == ["epoch2-step50"]
        assert mgr.all_steps() == [250]
        assert mgr.restore() == {"n": 1}


class Answers:
    def __init__(self, name: Any, step: Any) -> None:
        self.answers = name, step

    def name(self, step: int) -> Any:
        return self.answers[0](step)

    def step(self, name: str) -> Any:
        return self.answers[1](name)


def fails(_: object) -> Any:
    raise RuntimeError("no such thing")


BAD = {
    "leaves the root": (lambda s: f"../{s}", lambda n: int(n[3:])),
    "is hidden": (lambda s: f".{s}", lambda n: int(n[1:])),
    "is empty": (lambda s: "", lambda n: 3),
    "is no text": (lambda s: s, lambda n: 3),
    "is taken": (lambda s: "metadata", lambda n: 3),
    "is an attempt's": (lambda s: f"{s}.orbax-checkpoint-tmp-0", lambda n: 3),
    "is read as another step": (str, lambda n: int(n) + 1),
    "is not read": (str, lambda n: None),
    "raises": (fails, int),
    "raises when it is read": (str, fails),
    "is read as text": (str, lambda n: n),
}


@pytest.mark.parametrize("what", BAD)
def test_a_name_that_cannot_be_used_is_refused_before_anything_is_written(
    tmp_path: Path, what: str
) -> None:
    refused = pytest.raises(errors.InvalidArgumentError, match="step_names")
    with plain(tmp_path, step_names=Answers(*BAD[what])) as mgr, refused:
        mgr.save(3, {"n": 1})
    assert entries(tmp_path) == []


@pytest.mark.parametrize(
    "names",
    [Standard, "ckpt_{step}", 3, str, object()],
    ids=["a class", "a pattern", "a number", "a function", "an object"],
)
def test_what_cannot_name_steps_is_refused_at_once(tmp_path: Path, names: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="step_names"):
        plain(tmp_path, step_names=names)


@pytest.mark.parametrize("prefix", ["1", "a/b", "../x", "-a", ".a", 3, None, "a b", "x" * 101])
def test_a_prefix_that_cannot_be_meant_is_refused(prefix: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="prefix"):
        Standard(prefix)


@pytest.mark.parametrize("digits", [-1, 20, 1.0, True, "8", None])
def test_a_padding_that_cannot_be_meant_is_refused(digits: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="digits"):
        Standard("ckpt", digits)


def test_the_whole_one_of_two_names_counts(tmp_path: Path) -> None:
    names = Composite(Standard("ckpt"), Standard())
    with plain(tmp_path) as mgr:
        mgr.save(7, {"n": "old"}).result()
    with plain(tmp_path, step_names=Standard("ckpt")) as mgr:
        mgr.save(7, {"n": "new"}).result()
    (tmp_path / "ckpt_7" / "ckpt.json").write_bytes(b"damaged")
    with plain(tmp_path, step_names=names) as mgr:
        assert mgr.all_steps() == [7]
        assert mgr.restore(7) == mgr.restore() == {"n": "old"}
        assert mgr.verify(7)
        mgr.delete(7)
        assert mgr.all_steps() == []
        assert entries(tmp_path) == []


def test_a_step_that_is_not_kept_goes_under_all_of_its_names(tmp_path: Path) -> None:
    with plain(tmp_path) as mgr:
        mgr.save(7, {"n": "old"}).result()
    with plain(tmp_path, step_names=Standard("ckpt")) as mgr:
        mgr.save(7, {"n": "new"}).result()
    names = Composite(Standard("ckpt"), Standard())
    with plain(tmp_path, step_names=names, keep=ckpt.keep.Latest(1)) as mgr:
        mgr.save(8, {"n": 8}).result()
        mgr.wait_until_finished()
        assert mgr.all_steps() == [8]
    assert entries(tmp_path) == ["ckpt_8"]


def test_a_directory_of_others_under_another_name_is_not_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "20").mkdir()
    (tmp_path / "20" / "plot.png").write_bytes(b"mine")
    with plain(tmp_path, step_names=Composite(Standard("ckpt"), Standard())) as mgr:
        mgr.save(20, {"n": 1}).result()
        mgr.save(20, {"n": 2}, if_exists="replace").result()
        assert mgr.restore(20) == {"n": 2}
        mgr.delete(20)
        assert mgr.all_steps() == []
    assert entries(tmp_path) == ["20"]
    assert (tmp_path / "20" / "plot.png").read_bytes() == b"mine"
