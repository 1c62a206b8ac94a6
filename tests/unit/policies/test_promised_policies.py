"""Policies and names of steps, asked as programs of their own may ask them."""

from __future__ import annotations

import pytest

from ckpt.errors import InvalidArgumentError
from ckpt.keep import Best, EverySeconds, Healthy, KeepPolicy, Latest, SavedStep, Steps, best_of
from ckpt.save_when import EverySteps, SaveContext, SavePolicy, check_save_policy
from ckpt.step_names import Composite, Standard, StepNames

# Four steps, a hundred seconds apart; the last one is unhealthy, and has no metric.
RUN = (
    SavedStep(10, 1000.0, {"loss": 3.0}, nonfinite_leaves=0, custom_metadata={"seen": 1}),
    SavedStep(20, 1100.0, {"loss": 1.0}, nonfinite_leaves=0, groups={"train": {"loss": 1.0}}),
    SavedStep(30, 1200.0, {"loss": 2.0}, nonfinite_leaves=0),
    SavedStep(40, 1300.0, nonfinite_leaves=1, nonfinite=("w",), unequal_leaves=1, unequal=("b",)),
)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (EverySeconds(200), {10, 30}),
        (Healthy(2), {20, 30}),
        (Steps([20, 40, 50]), {20, 40}),
        (Best(1, "loss", "min", keep_without_metrics=False), {20}),
        (Best(1, "loss", "max", keep_without_metrics=True), {10, 40}),
        (Latest(1), {40}),
    ],
    ids=str,
)
def test_what_is_kept(policy: KeepPolicy, kept: set[int]) -> None:
    assert set(policy.keep(RUN, 1300.0)) == kept


def test_policies_say_what_they_were_given() -> None:
    best = Best(2, "loss", "min", keep_without_metrics=False)
    assert (best.n, best.metric, best.mode, best.keep_without_metrics) == (2, "loss", "min", False)
    assert set(Steps([3, 1]).steps) == {1, 3}


def test_a_policy_of_ones_own_knows_the_steps() -> None:
    last = RUN[-1]
    assert (last.step, last.time, last.metrics) == (40, 1300.0, None)
    assert (last.nonfinite_leaves, last.nonfinite) == (1, ("w",))
    assert (last.unequal_leaves, last.unequal) == (1, ("b",))
    left = SavedStep(50, 1400.0, left_behind=True)
    assert (last.left_behind, left.left_behind) == (False, True)
    assert [each.custom_metadata for each in RUN] == [{"seen": 1}, None, None, None]
    assert RUN[1].groups == {"train": {"loss": 1.0}}


def test_the_best_step() -> None:
    assert (best_of(RUN, "loss", "min"), best_of(RUN, "loss", "max")) == (20, 10)
    assert best_of(RUN, "accuracy", "max") is None


def test_save_policies() -> None:
    policy: SavePolicy = EverySteps(10)
    saving = (SavedStep(10, 1000.0),)
    context = SaveContext(
        1300.0,
        saving=saving,
        last_time=1000.0,
        step_seconds=0.5,
        lost_seconds=2.0,
        save_seconds=9.0,
    )
    assert (context.saving, context.last_time, context.step_seconds) == (saving, 1000.0, 0.5)
    assert (context.lost_seconds, context.save_seconds) == (2.0, 9.0)
    assert policy.refusal(step=20, previous=RUN[:1], context=context) is None
    assert "25" in (policy.refusal(step=25, previous=RUN[:1], context=context) or "")
    check_save_policy(policy)
    check_save_policy(lambda step, previous, context: step % 100 == 0)
    for wrong in (3, EverySteps, Latest(1)):
        with pytest.raises(InvalidArgumentError):
            check_save_policy(wrong)


def test_names_of_several_kinds() -> None:
    names: StepNames = Composite(Standard("ckpt", 8), Standard())
    assert names.name(100) == "ckpt_00000100"
    assert [names.step(each) for each in ("ckpt_00000100", "7", "other")] == [100, 7, None]
