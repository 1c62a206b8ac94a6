"""What policies are made of, and what a manager takes in their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt.errors import InvalidArgumentError


def test_counts_and_steps_come_as_numbers_of_numpy_too() -> None:
    one: Any = np.int64(1)
    for count in (
        ckpt.save_when.EverySteps(one).n,
        ckpt.keep.Latest(one).n,
        ckpt.keep.EverySteps(one).n,
        ckpt.keep.EverySteps(2, max_to_keep=one).max_to_keep,
        ckpt.keep.ClosestToEvery(one).n,
        ckpt.keep.ClosestToEvery(2, max_to_keep=one).max_to_keep,
        ckpt.keep.Best(one, "loss", "min").n,
        ckpt.keep.Healthy(one).n,
        ckpt.keep.Deletion(concurrency=one).concurrency,
        *ckpt.save_when.Steps([one]).steps,
    ):
        assert (type(count), count) == (int, 1)


@pytest.mark.parametrize(
    "value", [10**5000, -(10**5000), [10**5000]], ids=["great", "negative", "within"]
)
def test_what_is_too_long_to_write_is_refused_in_words(value: Any) -> None:
    """Python does not write such a number, so it must not get into a reason or a file's name."""
    calls: tuple[Any, ...] = (
        ckpt.save_when.EverySteps,
        ckpt.keep.Latest,
        ckpt.keep.EverySteps,
        ckpt.keep.ClosestToEvery,
        ckpt.save_when.EverySeconds,
        ckpt.save_when.Continuously,
        ckpt.save_when.BoundedOverhead,
        ckpt.keep.EverySeconds,
        ckpt.keep.Newer,
        ckpt.keep.Deletion,
        lambda value: ckpt.save_when.Steps([value]),
        lambda value: ckpt.keep.Steps([value]),
        lambda value: ckpt.keep.Best(value, "loss", "min"),
        ckpt.keep.Healthy,
        lambda value: ckpt.keep.Healthy(allow=value),
        lambda value: ckpt.keep.Best(1, "loss", value),
        lambda value: ckpt.keep.Best(1, value, "min"),
        lambda value: ckpt.keep.Deletion(trash=value),
        lambda value: ckpt.keep.Deletion(keep_latest=value),
        ckpt.save_when.Any,
        ckpt.keep.Any,
        lambda value: ckpt.save_when.refusal_of(
            lambda *_: value, 1, [], ckpt.save_when.SaveContext(0.0)
        ),
        lambda value: ckpt.keep.steps_kept(lambda _: value, [ckpt.keep.SavedStep(7, 0.0)], 0.0),
        lambda value: ckpt.keep.best_of(
            [ckpt.keep.SavedStep(1, 0.0, {"loss": value})], "loss", "min"
        ),
    )
    for call in calls:
        with pytest.raises(InvalidArgumentError, match="too long to write") as caught:
            call(value)
        assert len(str(caught.value)) < 400


def saved(mgr: ckpt.sync.CheckpointManager, *steps: int) -> list[int]:
    for step in steps:
        mgr.save(step, {"n": step})
    mgr.wait_until_finished()
    return mgr.all_steps()


@pytest.mark.parametrize("keep", [2, np.int64(2), {"*": 2}, ckpt.keep.Latest(2)], ids=str)
def test_a_number_keeps_so_many_of_the_latest_steps(tmp_path: Path, keep: Any) -> None:
    with ckpt.sync.CheckpointManager(tmp_path, keep=keep) as mgr:
        assert saved(mgr, 1, 2, 3, 4) == [3, 4]


@pytest.mark.parametrize("keep", [0, -1, True, 2.0, "2", {"*": 0}, {"*": None}], ids=str)
def test_what_is_no_number_of_steps_is_refused(tmp_path: Path, keep: Any) -> None:
    for make in (ckpt.sync.CheckpointManager, ckpt.tiers.Tier):
        with pytest.raises(InvalidArgumentError, match="keep"):
            make(tmp_path / "run", keep=keep)
    assert list(tmp_path.iterdir()) == []


def test_a_trash_is_named_by_its_folder(tmp_path: Path) -> None:
    trashes: tuple[Any, ...] = ("bin", tmp_path / "away", ckpt.keep.Deletion(trash="bin"))
    for number, trash in enumerate(trashes):
        with ckpt.sync.CheckpointManager(tmp_path / str(number), keep=1, trash=trash) as mgr:
            assert saved(mgr, 1, 2) == [2]
            assert [each.step for each in mgr.trash.steps()] == [1]
