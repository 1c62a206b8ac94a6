"""A policy that ranks by a metric which no step has says so."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
import ckpt.sync

STATE = {"w": np.arange(4.0)}


def saved(root: Path, preservation: Any, *metrics: Mapping[str, Any] | None) -> list[int]:
    """Save a step with each of these metrics; return the steps that are kept."""
    with ckpt.sync.CheckpointManager(root, keep=preservation) as mgr:
        for step, each in enumerate(metrics):
            mgr.save(step, STATE, metrics=each)
            mgr.wait_until_finished()
        return mgr.all_steps()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def test_a_misspelt_metric_is_named_once_with_the_near_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = ckpt.keep.Any(ckpt.keep.Latest(1), ckpt.keep.Best(1, metric="los", mode="min"))
    assert saved(tmp_path, policy, *[{"loss": 1 / (1 + step)} for step in range(4)]) == [0, 1, 2, 3]
    (said,) = warnings(caplog)
    assert "Best('los') has no value for step 0" in said
    assert "(is it 'loss'?)" in said
    assert "are all kept" in said


def test_so_are_steps_without_any_metrics(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    policy = ckpt.keep.Best(1, "loss", "min", keep_without_metrics=False)
    assert saved(tmp_path, policy, None, None, None) == [2]
    (said,) = warnings(caplog)
    assert "Best('loss') has no value for step 0, without metrics" in said
    assert "rank last" in said


def test_each_metric_is_named_also_in_policies_of_items(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = {"default": ckpt.keep.Best(1, "a", "min"), "*": ckpt.keep.Best(1, "b", "min")}
    saved(tmp_path, policy, {"c": 1}, {"c": 2})
    assert [line.split("Best(")[1][:3] for line in warnings(caplog) if "Best(" in line] == [
        "'a'",
        "'b'",
    ]


def test_a_function_gets_the_metrics_as_they_were_passed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Mapping[str, Any]] = []

    def score(metrics: Mapping[str, Any]) -> float:
        seen.append(metrics)
        return float(metrics["eval"]["top1"])

    passed = [{"eval": {"top1": top1}, "loss": float("inf")} for top1 in (0.1, 0.9, 0.5)]
    assert saved(tmp_path, ckpt.keep.Best(1, score, "max"), *passed) == [1, 2]
    assert seen[0] == passed[0]
    assert all(each in passed for each in seen)
    assert warnings(caplog) == []
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        assert mgr.best_step(score, "max") == 1


def test_a_function_that_gives_nothing_or_raises_is_not_silent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def looks_up(metrics: Mapping[str, Any]) -> float:
        return float(metrics["top1"])

    def broken(metrics: Mapping[str, Any]) -> float:
        raise ZeroDivisionError("in the function")

    saved(tmp_path / "a", ckpt.keep.Best(1, looks_up, "max"), {"loss": 1}, {"loss": 2})
    (said,) = warnings(caplog)
    assert "looks_up" in said
    assert "'loss'" in said
    caplog.clear()
    assert saved(tmp_path / "b", ckpt.keep.Best(1, broken, "max"), {"loss": 1}) == [0]
    (said,) = warnings(caplog)
    assert "broken" in said
    assert "in the function" in said


def test_steps_with_the_metric_say_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    losses = [{"loss": loss} for loss in (0.3, 0.1, float("nan"), 0.2)]
    assert saved(tmp_path, ckpt.keep.Best(1, "loss", "min"), *losses) == [1, 3]
    assert warnings(caplog) == []
