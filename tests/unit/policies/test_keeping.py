"""What to keep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt import policies as p
from ckpt.errors import InvalidArgumentError
from ckpt.policies import SavedStep, steps_kept
from tests.unit.policies import reference_policies as model
from tests.unit.policies.reference_policies import PRESERVATION, SIMPLE_PRESERVATION, saved_steps

NOW = 200.0


def steps_of(*numbers: int) -> list[SavedStep]:
    """Steps that were saved ten seconds apart."""
    return [SavedStep(number, 10.0 * place) for place, number in enumerate(numbers)]


def losses(*values: float | None) -> list[SavedStep]:
    """Steps 0, 1, 2... with these losses; None has no metrics at all."""
    return [
        SavedStep(step, 0.0, None if value is None else {"loss": value})
        for step, value in enumerate(values)
    ]


@pytest.mark.parametrize("kind", range(len(SIMPLE_PRESERVATION)))
@given(st.data())
def test_each_policy_keeps_what_it_promises(kind: int, data: st.DataObject) -> None:
    policy = data.draw(SIMPLE_PRESERVATION[kind])
    steps, now = data.draw(saved_steps()), data.draw(st.integers(0, 250).map(float))
    assert steps_kept(policy, steps, now) == model.kept(policy, steps, now)


@given(PRESERVATION, saved_steps(), st.integers(0, 250).map(float))
def test_compositions_keep_what_their_members_keep(
    policy: Any, steps: list[SavedStep], now: float
) -> None:
    before = list(steps)
    found = steps_kept(policy, steps, now)
    assert found == model.kept(policy, steps, now)
    assert found == steps_kept(policy, steps, now)
    assert steps == before


@pytest.mark.parametrize("kind", range(len(SIMPLE_PRESERVATION) + 1))
@given(st.data())
def test_it_does_not_matter_when_and_in_how_many_rounds_is_deleted(
    kind: int, data: st.DataObject
) -> None:
    """Deleting after every commit, or once at the end, leaves the same; twice is once."""
    policy = data.draw([*SIMPLE_PRESERVATION, PRESERVATION][kind])
    steps = data.draw(saved_steps())
    now = data.draw(st.integers(0, 250).map(float))
    earlier = now - data.draw(st.integers(0, 50))
    first_round = [saved for saved in steps if data.draw(st.booleans())]
    left = steps_kept(policy, first_round, earlier)
    then = [saved for saved in steps if saved not in first_round or saved.step in left]
    kept = steps_kept(policy, then, now)
    assert kept == steps_kept(policy, steps, now)
    assert kept == steps_kept(policy, [saved for saved in steps if saved.step in kept], now)


@given(saved_steps(), st.integers(1, 9))
def test_something_is_kept_of_every_span_that_has_a_step(steps: list[SavedStep], n: int) -> None:
    kept = steps_kept(p.EveryNSteps(n, exact=False), steps, NOW)
    assert {step // n for step in kept} == {saved.step // n for saved in steps}
    assert len(kept) == len({step // n for step in kept})


def test_examples_of_what_is_kept() -> None:
    steps = steps_of(0, 95, 100, 190, 205, 310)
    assert steps_kept(p.EveryNSteps(100), steps, NOW) == {0, 100}
    assert steps_kept(p.EveryNSteps(100, exact=False), steps, NOW) == {0, 100, 205, 310}
    assert steps_kept(p.EveryNSteps(100, exact=False, max_to_keep=2), steps, NOW) == {205, 310}
    assert steps_kept(p.EveryNStepsClosest(100), steps, NOW) == {0, 100, 205, 310}
    assert steps_kept(p.EveryNStepsClosest(100, max_to_keep=1), steps, NOW) == {310}
    assert steps_kept(p.EveryNSeconds(20), steps, NOW) == {0, 100, 205}
    assert steps_kept(p.LatestDuration(160), steps, NOW) == {205, 310}
    assert steps_kept(p.LatestN(2), steps, NOW) == {205, 310}
    behind = [replace(each, left_behind=each.step > 200) for each in steps]
    assert steps_kept(p.LatestN(2), behind, NOW) == {100, 190, 205, 310}
    assert steps_kept(p.CustomSteps([95, 7]), steps, NOW) == {95}
    assert steps_kept(p.PreserveAll(), steps, NOW) == {0, 95, 100, 190, 205, 310}
    both = p.AnyPreservation(p.LatestN(1), p.CustomSteps([95]), lambda step: step == 190)
    assert steps_kept(both, steps, NOW) == {95, 190, 310}


def test_the_greater_of_two_that_are_as_close_is_kept() -> None:
    assert steps_kept(p.EveryNStepsClosest(10), steps_of(8, 12), NOW) == {12}
    assert steps_kept(p.EveryNStepsClosest(10), steps_of(5, 7), NOW) == {7}
    # 5 lies between 0 and 10, and counts for 10.
    assert steps_kept(p.EveryNStepsClosest(10), steps_of(0, 5), NOW) == {0, 5}


def test_steps_from_the_future_are_young() -> None:
    assert steps_kept(p.LatestDuration(1), [SavedStep(1, NOW + 1000)], NOW) == {1}


class TestBest:
    def test_the_best_are_kept_whatever_came_later(self) -> None:
        steps = losses(0.5, 0.1, 0.3, 0.9)
        assert steps_kept(p.BestN(2, "loss", "min"), steps, NOW) == {1, 2}
        assert steps_kept(p.BestN(2, "loss", "max"), steps, NOW) == {0, 3}
        assert steps_kept(p.BestN(9, "loss", "max"), steps, NOW) == {0, 1, 2, 3}

    @pytest.mark.parametrize("mode", ["min", "max"])
    def test_not_a_number_is_worse_than_the_worst_number(self, mode: Any) -> None:
        steps = losses(math.nan, math.inf, -math.inf, 0.0, math.nan)
        assert steps_kept(p.BestN(3, "loss", mode), steps, NOW) == {1, 2, 3}
        # It is a metric all the same: a run that has diverged does not keep every step.
        assert steps_kept(p.BestN(4, "loss", mode), steps, NOW) == {1, 2, 3, 4}
        assert p.best_of(losses(math.nan, math.nan), "loss", mode) is None

    @pytest.mark.parametrize("mode", ["min", "max"])
    def test_of_equals_the_greater_step_is_better(self, mode: Any) -> None:
        steps = losses(0.5, 0.5, 0.5)
        assert steps_kept(p.BestN(1, "loss", mode), steps, NOW) == {2}
        assert p.best_of(steps, "loss", mode) == 2
        assert p.best_of(steps[::-1], "loss", mode) == 2

    def test_steps_without_metrics_are_kept_or_come_last(self) -> None:
        steps = [*losses(None, 0.5, math.nan, None), SavedStep(4, 0.0, {"accuracy": 1.0})]
        assert steps_kept(p.BestN(1, "loss", "min"), steps, NOW) == {0, 1, 3, 4}
        drop = [p.BestN(n, "loss", "min", keep_without_metrics=False) for n in (1, 2, 3, 4)]
        assert [steps_kept(policy, steps, NOW) for policy in drop] == [
            {1},
            {1, 2},
            {1, 2, 4},
            {1, 2, 3, 4},
        ]

    def test_a_misspelled_metric_does_not_delete_everything(self) -> None:
        steps = losses(*map(float, range(10)))
        assert len(steps_kept(p.BestN(3, "los", "min"), steps, NOW)) == 10
        policy = p.BestN(3, "los", "min", keep_without_metrics=False)
        assert steps_kept(policy, steps, NOW) == {7, 8, 9}

    def test_a_function_of_the_metrics_ranks_too(self) -> None:
        steps = [
            SavedStep(0, 0.0, {"a": 1.0, "b": 9.0}),
            SavedStep(1, 0.0, {"a": 2.0, "b": 0.0}),
            SavedStep(2, 0.0, {"a": 3.0}),
            SavedStep(3, 0.0, {"a": 0.0, "b": 0.5}),
        ]
        policy = p.BestN(1, lambda m: m["a"] + m["b"], "max", keep_without_metrics=False)
        assert steps_kept(policy, steps, NOW) == {0}
        assert p.best_of(steps, lambda m: m["a"] + m["b"], "min") == 3
        assert p.best_of(steps, lambda m: np.float32(m["a"]), "max") == 2  # type: ignore[arg-type, return-value]
        assert p.best_of(steps, lambda m: None, "max") is None

    def test_a_function_that_changes_the_metrics_changes_a_copy(self) -> None:
        steps = losses(0.1, 0.5)
        policy = p.BestN(1, lambda m: m.pop("loss"), "min", keep_without_metrics=False)  # type: ignore[attr-defined]
        assert steps_kept(policy, steps, NOW) == steps_kept(policy, steps, NOW) == {0}

    @pytest.mark.parametrize("value", ["0.5", "loss", b"1", [1.0], {}, 10**400])
    def test_what_is_no_number_is_an_error(self, value: Any) -> None:
        with pytest.raises(InvalidArgumentError, match="is not a number") as caught:
            steps_kept(p.BestN(1, lambda m: value, "min"), losses(0.5), NOW)
        assert "test_what_is_no_number" in str(caught.value)
        assert caught.value.step == 0
        with pytest.raises(InvalidArgumentError, match="'loss'"):
            p.best_of(losses(value), "loss", "min")

    @pytest.mark.parametrize(("metric", "mode"), [("loss", "minimum"), (3, "min")])
    def test_what_is_wrong_is_said_of_what_people_call(self, metric: Any, mode: Any) -> None:
        with pytest.raises(InvalidArgumentError, match=r"^best_step\((mode='minimum'|metric=3)\)"):
            p.best_of(losses(0.5), metric, mode)

    def test_what_a_function_raises_is_said(self) -> None:
        with pytest.raises(InvalidArgumentError, match="ZeroDivisionError") as caught:
            p.best_of(losses(0.0), lambda m: 1 / m["loss"], "min")
        assert isinstance(caught.value.__cause__, ZeroDivisionError)

    @given(saved_steps(), st.sampled_from(["loss", "accuracy"]), st.sampled_from(["min", "max"]))
    def test_the_best_step_is_the_one_that_is_kept_longest(
        self, steps: list[SavedStep], metric: str, mode: Any
    ) -> None:
        best = p.best_of(steps, metric, mode)
        values = [s.metrics[metric] for s in steps if s.metrics and metric in s.metrics]
        numbers = [value for value in values if not math.isnan(value)]
        if not numbers:
            assert best is None
        else:
            policy = p.BestN(1, metric, mode, keep_without_metrics=False)
            assert steps_kept(policy, steps, NOW) == {best}

    @pytest.mark.parametrize(
        "arguments",
        [
            {"n": 0},
            {"n": 1.0},
            {"n": None},
            {"metric": ""},
            {"metric": None},
            {"metric": float},
            {"metric": 3},
            {"mode": "lowest"},
            {"mode": None},
            {"mode": ["min"]},
            {"keep_without_metrics": None},
        ],
    )
    def test_wrong_arguments(self, arguments: dict[str, Any]) -> None:
        good: dict[str, Any] = {"n": 1, "metric": "loss", "mode": "min"}
        ((name, value),) = arguments.items()
        with pytest.raises(InvalidArgumentError, match="BestN") as caught:
            p.BestN(**{**good, **arguments})
        assert f"{name}={value!r}" in str(caught.value)

    def test_there_is_no_default_for_the_mode(self) -> None:
        with pytest.raises(TypeError, match="mode"):
            p.BestN(1, "loss")  # type: ignore[call-arg]


class TestRanking:
    def test_it_is_found_among_members(self) -> None:
        best = p.BestN(3, "loss", "min")
        assert p.ranking_of(best) is best
        assert p.ranking_of(p.AnyPreservation(p.LatestN(1), best)) is best
        nested = p.AnyPreservation(p.AnyPreservation(p.LatestN(1), best), lambda step: True)
        assert p.ranking_of(nested) is best
        assert p.ranking_of(p.LatestN(1)) is None
        assert p.ranking_of(None) is None

    def test_those_that_rank_differently_are_none(self) -> None:
        best = p.BestN(3, "loss", "min")
        assert p.ranking_of(p.AnyPreservation(best, p.BestN(5, "loss", "min"))) is best
        assert p.ranking_of(p.AnyPreservation(best, p.BestN(3, "loss", "max"))) is None
        assert p.ranking_of(p.AnyPreservation(best, p.BestN(3, "accuracy", "min"))) is None


class Answer:
    """A policy that answers anything."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def keep(self, steps: Sequence[SavedStep], now: float) -> Any:
        return self.answer(steps) if callable(self.answer) else self.answer

    def __repr__(self) -> str:
        return "Answer()"


class TestPoliciesOfOthers:
    """One that misbehaves must not cause a deletion: there is an error, so nothing is deleted."""

    @pytest.mark.parametrize(
        "answer",
        [
            None,
            3,
            True,
            "123",
            b"123",
            [0, 1, 2],  # positions
            [True, False, True, True],  # Orbax's answer
            [100, 999],  # a step there is not
            [100.0],
            ["100"],
            [None],
            lambda steps: steps,  # the records, not their steps
        ],
    )
    def test_an_answer_that_is_none_is_an_error(self, answer: Any) -> None:
        steps = steps_of(1, 100, 200, 300)
        for policy in (Answer(answer), p.AnyPreservation(p.LatestN(1), Answer(answer))):
            with pytest.raises(InvalidArgumentError, match=r"Answer\(\).*Nothing was deleted"):
                steps_kept(policy, steps, NOW)

    @pytest.mark.parametrize(
        "answer", [[100], (100,), {100: "a"}, iter([100]), np.array([100]), {np.int64(100)}]
    )
    def test_every_collection_of_steps_will_do(self, answer: Any) -> None:
        found = steps_kept(Answer(answer), steps_of(1, 100), NOW)
        assert found == {100}
        assert {type(step) for step in found} == {int}

    @pytest.mark.parametrize("answer", [None, 1, "yes", [], np.int64(1), np.array([True])])
    def test_a_function_answers_true_or_false(self, answer: Any) -> None:
        def chosen(step: int) -> Any:
            return answer

        with pytest.raises(InvalidArgumentError, match="chosen") as caught:
            steps_kept(chosen, steps_of(7), NOW)
        assert repr(answer) in str(caught.value)
        assert steps_kept(lambda step: np.bool_(step > 7), steps_of(7, 8), NOW) == {8}  # type: ignore[arg-type, return-value]

    def test_what_it_raises_is_said(self) -> None:
        def broken(step: int) -> bool:
            raise OSError("no such thing")

        for policy in (broken, Answer(lambda steps: 1 // 0)):
            with pytest.raises(InvalidArgumentError, match=r"broken|Answer") as caught:
                steps_kept(policy, steps_of(7), NOW)
            assert isinstance(caught.value.__cause__, OSError | ZeroDivisionError)

    def test_it_cannot_change_which_steps_there_are(self) -> None:
        steps = steps_of(1, 2, 3)
        with pytest.raises(InvalidArgumentError, match="AttributeError"):
            steps_kept(Answer(lambda given: given.clear()), steps, NOW)
        assert len(steps) == 3

    def test_it_is_asked_with_the_time(self) -> None:
        class Young:
            def keep(self, steps: Sequence[SavedStep], now: float) -> set[int]:
                return {saved.step for saved in steps if saved.time > now - 15}

        assert steps_kept(Young(), steps_of(1, 2, 3), 30.0) == {3}

    @pytest.mark.parametrize(
        ("policy", "hint"),
        [
            (p.LatestN, "pass an instance"),
            (3, "type int"),
            (None, "type NoneType"),
            ("LatestN", "type str"),
            ([p.LatestN(1)], "AnyPreservation"),
            (p.FixedInterval(3), "save_policy"),
        ],
    )
    def test_what_is_none_is_refused(self, policy: Any, hint: str) -> None:
        for refused in (p.check_preservation, p.AnyPreservation):
            with pytest.raises(InvalidArgumentError, match="preservation policy") as caught:
                refused(policy)
            assert hint in str(caught.value)

    def test_an_async_one_is_refused(self) -> None:
        async def keep(step: int) -> bool:
            return True

        class Slow:
            async def keep(self, steps: Sequence[SavedStep], now: float) -> set[int]:
                return set()

        for policy in (keep, Slow()):
            with pytest.raises(InvalidArgumentError, match="async"):
                p.check_preservation(policy)

    def test_what_is_one_is_taken(self) -> None:
        for policy in (p.LatestN(1), Answer(None), lambda step: True, {1, 2}.__contains__):
            p.check_preservation(policy)


WRONG_COUNTS = [0, -1, 1.0, True, None, "3", np.float64(2)]
WRONG_SECONDS = [0, -1, math.nan, math.inf, -math.inf, True, None, "3", 10**400]


@pytest.mark.parametrize("n", WRONG_COUNTS)
def test_counts_that_cannot_be_meant_are_refused(n: Any) -> None:
    for policy in (p.LatestN, p.EveryNSteps, p.EveryNStepsClosest):
        with pytest.raises(InvalidArgumentError, match=policy.__name__) as caught:
            policy(n)
        assert repr(n) in str(caught.value)
    for policy in (p.EveryNSteps, p.EveryNStepsClosest):
        if n is not None:
            with pytest.raises(InvalidArgumentError, match="max_to_keep"):
                policy(1, max_to_keep=n)
    with pytest.raises(InvalidArgumentError, match="exact"):
        p.EveryNSteps(1, exact=n if n is not True else 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", WRONG_SECONDS)
def test_seconds_that_cannot_be_meant_are_refused(seconds: Any) -> None:
    for policy in (p.EveryNSeconds, p.LatestDuration):
        with pytest.raises(InvalidArgumentError, match=policy.__name__) as caught:
            policy(seconds)
        assert repr(seconds)[:40] in str(caught.value)


@pytest.mark.parametrize("steps", [3, None, [-1], [1.5], ["a"], "12", [True], [None]])
def test_steps_that_cannot_be_meant_are_refused(steps: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="CustomSteps"):
        p.CustomSteps(steps)


def test_no_member_is_too_few() -> None:
    with pytest.raises(InvalidArgumentError, match=r"AnyPreservation\(\)"):
        p.AnyPreservation()
