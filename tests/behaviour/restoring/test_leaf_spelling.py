"""A leaf of an item is written `item:leaf.path`, wherever it is asked for, and shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import ckpt
from ckpt import errors
from tests.support.command import in_this_process

LEAF = "model:mlp/~/linear.w"
W = np.array([[1.0, np.nan], [3.0, 4.0]], np.float32)
MODEL = {"mlp/~/linear": {"w": W, "b": np.zeros(2, np.float32)}, "step": 3}
# A leaf of the same path, with other values.
OTHER = {"mlp/~/linear": {"w": -W}}


@pytest.fixture
def step(tmp_path: Path) -> Path:
    with ckpt.sync.CheckpointManager(
        tmp_path / "run", extensions=[ckpt.extensions.VitalSigns()]
    ) as mgr:
        mgr.save(1, items={"model": MODEL, "other": OTHER})
    return tmp_path / "run" / "1"


def restored(step: Path) -> Any:
    with ckpt.sync.CheckpointManager(step.parent, mode="r") as mgr:
        return mgr.restore(1, at=LEAF)


def converted(step: Path) -> Any:
    ckpt.sync.convert(step, step.parent.parent / "w.safetensors", format="safetensors", at=LEAF)
    [found] = load_file(step.parent.parent / "w.safetensors").values()
    return found


ASKED: dict[str, Callable[[Path], Any]] = {
    "load": lambda step: ckpt.sync.load(step, at=LEAF),
    "load onto a target": lambda step: ckpt.sync.load(step, like=np.zeros_like(W), at=LEAF),
    "restore": restored,
    "merge": lambda step: ckpt.sync.merge({step: 1.0}, at=LEAF),
    "open_array": lambda step: ckpt.sync.open_array(step, LEAF)[...],
    "Source": lambda step: ckpt.sync.load({"w": ckpt.Source(step, at=LEAF)})["w"],
    "convert": converted,
}


@pytest.mark.parametrize("ask", ASKED.values(), ids=list(ASKED))
def test_it_is_asked_for(ask: Callable[[Path], Any], step: Path) -> None:
    assert np.array_equal(ask(step), W, equal_nan=True)


def test_a_branch_and_a_whole_item_are_trees_of_their_own(step: Path) -> None:
    assert ckpt.sync.load(step, at="model:step") == 3
    assert ckpt.sync.load(step, at="model:mlp/~/linear").keys() == {"w", "b"}
    assert ckpt.sync.load(step, at="other").keys() == OTHER.keys()
    assert ckpt.sync.load({"o": ckpt.Source(step, at="other")})["o"].keys() == OTHER.keys()


@pytest.mark.parametrize(
    "ask",
    [
        lambda step, leaf: ckpt.sync.load(step, at=leaf),
        lambda step, leaf: ckpt.sync.open_array(step, leaf),
        lambda step, leaf: ckpt.sync.load({"w": ckpt.Source(step, at=leaf)}),
        lambda step, leaf: ckpt.sync.convert(step, step.parent / "x", format="zarr", at=leaf),
    ],
)
def test_a_leaf_without_its_item_is_an_error(ask: Any, step: Path) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=r"several items .*'model:step'"):
        ask(step, "model.step")


def test_it_is_selected(step: Path, capsys: pytest.CaptureFixture[str]) -> None:
    into = step.parent.parent / "copy"
    assert in_this_process(capsys, "cp", step, into, "--select", LEAF).status == 0
    assert ckpt.sync.load(into).keys() == {"model"}
    assert np.array_equal(ckpt.sync.load(into, at=LEAF), W, equal_nan=True)


def test_it_is_shown(step: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = LEAF.replace("/", "%2F")
    assert stored in str(ckpt.sync.metadata(step))
    for command in (["show", step], ["show", step, LEAF]):
        assert stored in in_this_process(capsys, *command).out
    policy = ckpt.keep.Healthy(allow=["model:**.w", "other:**.w"])
    found: list[ckpt.keep.SavedStep] = []

    class Seeing:
        def keep(self, steps: Sequence[ckpt.keep.SavedStep], now: float) -> frozenset[int]:
            found.extend(steps)
            return frozenset(each.step for each in steps)

    with ckpt.sync.CheckpointManager(step.parent, keep=Seeing()) as mgr:
        mgr.save(2, items={"model": MODEL, "other": OTHER}, durable=True)
    assert stored in found[0].nonfinite
    assert policy.keep(found[:1], 0.0) == {1}
    assert ckpt.keep.Healthy(allow=["model:**.w"]).keep(found[:1], 0.0) == frozenset()
    assert ckpt.keep.Healthy(allow=["**.w"]).keep(found[:1], 0.0) == {1}
