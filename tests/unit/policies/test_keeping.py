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

import ckpt
from ckpt.errors import InvalidArgumentError
from tests.unit.policies import reference_policies as model
from tests.unit.policies.reference_policies import PRESERVATION, SIMPLE_PRESERVATION, saved_steps

NOW = 200.0


def steps_of(*numbers: int) -> list[ckpt.keep.SavedStep]:
    """Steps that were saved ten seconds apart."""
    return [ckpt.keep.SavedStep(number, 10.0 * place) for place, number in enumerate(numbers)]


def losses(*values: float | None) -> list[ckpt.keep.SavedStep]:
    """Steps 0, 1, 2... with these losses; None has no metrics at all."""
    return [
        ckpt.keep.SavedStep(step, 0.0, None if value is None else {"loss": value})
        for step, value in enumerate(values)
    ]


@pytest.mark.parametrize("kind", range(len(SIMPLE_PRESERVATION)))
@given(st.data())
def test_each_policy_keeps_what_it_promises(kind: int, data: st.DataObject) -> None:
    policy = data.draw(SIMPLE_PRESERVATION[kind])
    steps, now = data.draw(saved_steps()), data.draw(st.integers(0, 250).map(float))
    assert ckpt.keep.steps_kept(policy, steps, now) == model.kept(policy, steps, now)


@given(PRESERVATION, saved_steps(), st.integers(0, 250).map(float))
def test_compositions_keep_what_their_members_keep(
    policy: Any, steps: list[ckpt.keep.SavedStep], now: float
) -> None:
    before = list(steps)
    found = ckpt.keep.steps_kept(policy, steps, now)
    assert found == model.kept(policy, steps, now)
    assert found == ckpt.keep.steps_kept(policy, steps, now)
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
    left = ckpt.keep.steps_kept(policy, first_round, earlier)
    then = [saved for saved in steps if saved not in first_round or saved.step in left]
    kept = ckpt.keep.steps_kept(policy, then, now)
    assert kept == ckpt.keep.steps_kept(policy, steps, now)
    assert kept == ckpt.keep.steps_kept(
        policy, [saved for saved in steps if saved.step in kept], now
    )


@given(saved_steps(), st.integers(1, 9))
def test_something_is_kept_of_every_span_that_has_a_step(
    steps: list[ckpt.keep.SavedStep], n: int
) -> None:
    kept = ckpt.keep.steps_kept(ckpt.keep.EverySteps(n, exact=False), steps, NOW)
    assert {step // n for step in kept} == {saved.step // n for saved in steps}
    assert len(kept) == len({step // n for step in kept})


def test_examples_of_what_is_kept() -> None:
    steps = steps_of(0, 95, 100, 190, 205, 310)
    assert ckpt.keep.steps_kept(ckpt.keep.EverySteps(100), steps, NOW) == {0, 100}
    assert ckpt.keep.steps_kept(ckpt.keep.EverySteps(100, exact=False), steps, NOW) == {
        0,
        100,
        205,
        310,
    }
    assert ckpt.keep.steps_kept(
        ckpt.keep.EverySteps(100, exact=False, max_to_keep=2), steps, NOW
    ) == {205, 310}
    assert ckpt.keep.steps_kept(ckpt.keep.ClosestToEvery(100), steps, NOW) == {0, 100, 205, 310}
    assert ckpt.keep.steps_kept(ckpt.keep.ClosestToEvery(100, max_to_keep=1), steps, NOW) == {310}
    assert ckpt.keep.steps_kept(ckpt.keep.EverySeconds(20), steps, NOW) == {0, 100, 205}
    assert ckpt.keep.steps_kept(ckpt.keep.Newer(160), steps, NOW) == {205, 310}
    assert ckpt.keep.steps_kept(ckpt.keep.Latest(2), steps, NOW) == {205, 310}
    behind = [replace(each, left_behind=each.step > 200) for each in steps]
    assert ckpt.keep.steps_kept(ckpt.keep.Latest(2), behind, NOW) == {100, 190, 205, 310}
    assert ckpt.keep.steps_kept(ckpt.keep.Steps([95, 7]), steps, NOW) == {95}
    assert ckpt.keep.steps_kept(ckpt.keep.All(), steps, NOW) == {0, 95, 100, 190, 205, 310}
    both = ckpt.keep.Any(ckpt.keep.Latest(1), ckpt.keep.Steps([95]), lambda step: step == 190)
    assert ckpt.keep.steps_kept(both, steps, NOW) == {95, 190, 310}


def test_the_greater_of_two_that_are_as_close_is_kept() -> None:
    assert ckpt.keep.steps_kept(ckpt.keep.ClosestToEvery(10), steps_of(8, 12), NOW) == {12}
    assert ckpt.keep.steps_kept(ckpt.keep.ClosestToEvery(10), steps_of(5, 7), NOW) == {7}
    # 5 lies between 0 and 10, and counts for 10.
    assert ckpt.keep.steps_kept(ckpt.keep.ClosestToEvery(10), steps_of(0, 5), NOW) == {0, 5}


def test_steps_from_the_future_are_young() -> None:
    assert ckpt.keep.steps_kept(ckpt.keep.Newer(1), [ckpt.keep.SavedStep(1, NOW + 1000)], NOW) == {
        1
    }


class TestBest:
    def test_the_best_are_kept_whatever_came_later(self) -> None:
        steps = losses(0.5, 0.1, 0.3, 0.9)
        assert ckpt.keep.steps_kept(ckpt.keep.Best(2, "loss", "min"), steps, NOW) == {1, 2}
        assert ckpt.keep.steps_kept(ckpt.keep.Best(2, "loss", "max"), steps, NOW) == {0, 3}
        assert ckpt.keep.steps_kept(ckpt.keep.Best(9, "loss", "max"), steps, NOW) == {0, 1, 2, 3}

    @pytest.mark.parametrize("mode", ["min", "max"])
    def test_not_a_number_is_worse_than_the_worst_number(self, mode: Any) -> None:
        steps = losses(math.nan, math.inf, -math.inf, 0.0, math.nan)
        assert ckpt.keep.steps_kept(ckpt.keep.Best(3, "loss", mode), steps, NOW) == {1, 2, 3}
        # It is a metric all the same: a run that has diverged does not keep every step.
        assert ckpt.keep.steps_kept(ckpt.keep.Best(4, "loss", mode), steps, NOW) == {1, 2, 3, 4}
        assert ckpt.keep.best_of(losses(math.nan, math.nan), "loss", mode) is None

    @pytest.mark.parametrize("mode", ["min", "max"])
    def test_of_equals_the_greater_step_is_better(self, mode: Any) -> None:
        steps = losses(0.5, 0.5, 0.5)
        assert ckpt.keep.steps_kept(ckpt.keep.Best(1, "loss", mode), steps, NOW) == {2}
        assert ckpt.keep.best_of(steps, "loss", mode) == 2
        assert ckpt.keep.best_of(steps[::-1], "loss", mode) == 2

    def test_steps_without_metrics_are_kept_or_come_last(self) -> None:
        steps = [*losses(None, 0.5, math.nan, None), ckpt.keep.SavedStep(4, 0.0, {"accuracy": 1.0})]
        assert ckpt.keep.steps_kept(ckpt.keep.Best(1, "loss", "min"), steps, NOW) == {0, 1, 3, 4}
        drop = [ckpt.keep.Best(n, "loss", "min", keep_without_metrics=False) for n in (1, 2, 3, 4)]
        assert [ckpt.keep.steps_kept(policy, steps, NOW) for policy in drop] == [
            {1},
            {1, 2},
            {1, 2, 4},
            {1, 2, 3, 4},
        ]

    def test_a_misspelled_metric_does_not_delete_everything(self) -> None:
        steps = losses(*map(float, range(10)))
        assert len(ckpt.keep.steps_kept(ckpt.keep.Best(3, "los", "min"), steps, NOW)) == 10
        policy = ckpt.keep.Best(3, "los", "min", keep_without_metrics=False)
        assert ckpt.keep.steps_kept(policy, steps, NOW) == {7, 8, 9}

    def test_a_function_of_the_metrics_ranks_too(self) -> None:
        steps = [
            ckpt.keep.SavedStep(0, 0.0, {"a": 1.0, "b": 9.0}),
            ckpt.keep.SavedStep(1, 0.0, {"a": 2.0, "b": 0.0}),
            ckpt.keep.SavedStep(2, 0.0, {"a": 3.0}),
            ckpt.keep.SavedStep(3, 0.0, {"a": 0.0, "b": 0.5}),
        ]
        policy = ckpt.keep.Best(1, lambda m: m["a"] + m["b"], "max", keep_without_metrics=False)
        assert ckpt.keep.steps_kept(policy, steps, NOW) == {0}
        assert ckpt.keep.best_of(steps, lambda m: m["a"] + m["b"], "min") == 3
        assert ckpt.keep.best_of(steps, lambda m: np.float32(m["a"]), "max") == 2  # type: ignore[arg-type, return-value]
        assert ckpt.keep.best_of(steps, lambda m: None, "max") is None

    def test_a_function_that_changes_the_metrics_changes_a_copy(self) -> None:
        steps = losses(0.1, 0.5)
        policy = ckpt.keep.Best(1, lambda m: m.pop("loss"), "min", keep_without_metrics=False)  # type: ignore[attr-defined]
        assert (
            ckpt.keep.steps_kept(policy, steps, NOW)
            == ckpt.keep.steps_kept(policy, steps, NOW)
            == {0}
        )

    @pytest.mark.parametrize("value", ["0.5", "loss", b"1", [1.0], {}, 10**400])
    def test_what_is_no_number_is_an_error(self, value: Any) -> None:
        with pytest.raises(InvalidArgumentError, match="is not a number") as caught:
            ckpt.keep.steps_kept(ckpt.keep.Best(1, lambda m: value, "min"), losses(0.5), NOW)
        assert "test_what_is_no_number" in str(caught.value)
        assert caught.value.step == 0
        with pytest.raises(InvalidArgumentError, match="'loss'"):
            ckpt.keep.best_of(losses(value), "loss", "min")

    @pytest.mark.parametrize(("metric", "mode"), [("loss", "minimum"), (3, "min")])
    def test_what_is_wrong_is_said_of_what_people_call(self, metric: Any, mode: Any) -> None:
        with pytest.raises(InvalidArgumentError, match=r"^best_step\((mode='minimum'|metric=3)\)"):
            ckpt.keep.best_of(losses(0.5), metric, mode)

    def test_what_a_function_raises_is_said(self) -> None:
        with pytest.raises(InvalidArgumentError, match="ZeroDivisionError") as caught:
            ckpt.keep.best_of(losses(0.0), lambda m: 1 / m["loss"], "min")
        assert isinstance(caught.value.__cause__, ZeroDivisionError)

    @given(saved_steps(), st.sampled_from(["loss", "accuracy"]), st.sampled_from(["min", "max"]))
    def test_the_best_step_is_the_one_that_is_kept_longest(
        self, steps: list[ckpt.keep.SavedStep], metric: str, mode: Any
    ) -> None:
        best = ckpt.keep.best_of(steps, metric, mode)
        values = [s.metrics[metric] for s in steps if s.metrics and metric in s.metrics]
        numbers = [value for value in values if not math.isnan(value)]
        if not numbers:
            assert best is None
        else:
            policy = ckpt.keep.Best(1, metric, mode, keep_without_metrics=False)
            assert ckpt.keep.steps_kept(policy, steps, NOW) == {best}

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
        with pytest.raises(InvalidArgumentError, match="Best") as caught:
            ckpt.keep.Best(**{**good, **arguments})
        assert f"{name}={value!r}" in str(caught.value)

    def test_there_is_no_default_for_the_mode(self) -> None:
        with pytest.raises(TypeError, match="mode"):
            ckpt.keep.Best(1, "loss")  # type: ignore[call-arg]


class TestRanking:
    def test_it_is_found_among_members(self) -> None:
        best = ckpt.keep.Best(3, "loss", "min")
        assert ckpt.keep.ranking_of(best) is best
        assert ckpt.keep.ranking_of(ckpt.keep.Any(ckpt.keep.Latest(1), best)) is best
        nested = ckpt.keep.Any(ckpt.keep.Any(ckpt.keep.Latest(1), best), lambda step: True)
        assert ckpt.keep.ranking_of(nested) is best
        assert ckpt.keep.ranking_of(ckpt.keep.Latest(1)) is None
        assert ckpt.keep.ranking_of(None) is None

    def test_those_that_rank_differently_are_none(self) -> None:
        best = ckpt.keep.Best(3, "loss", "min")
        assert ckpt.keep.ranking_of(ckpt.keep.Any(best, ckpt.keep.Best(5, "loss", "min"))) is best
        assert ckpt.keep.ranking_of(ckpt.keep.Any(best, ckpt.keep.Best(3, "loss", "max"))) is None
        assert (
            ckpt.keep.ranking_of(ckpt.keep.Any(best, ckpt.keep.Best(3, "accuracy", "min"))) is None
        )


class Answer:
    """A policy that answers anything."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def keep(self, steps: Sequence[ckpt.keep.SavedStep], now: float) -> Any:
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
        for policy in (Answer(answer), ckpt.keep.Any(ckpt.keep.Latest(1), Answer(answer))):
            with pytest.raises(InvalidArgumentError, match=r"Answer\(\).*Nothing was deleted"):
                ckpt.keep.steps_kept(policy, steps, NOW)

    @pytest.mark.parametrize(
        "answer", [[100], (100,), {100: "a"}, iter([100]), np.array([100]), {np.int64(100)}]
    )
    def test_every_collection_of_steps_will_do(self, answer: Any) -> None:
        found = ckpt.keep.steps_kept(Answer(answer), steps_of(1, 100), NOW)
        assert found == {100}
        assert {type(step) for step in found} == {int}

    @pytest.mark.parametrize("answer", [None, 1, "yes", [], np.int64(1), np.array([True])])
    def test_a_function_answers_true_or_false(self, answer: Any) -> None:
        def chosen(step: int) -> Any:
            return answer

        with pytest.raises(InvalidArgumentError, match="chosen") as caught:
            ckpt.keep.steps_kept(chosen, steps_of(7), NOW)
        assert repr(answer) in str(caught.value)
        assert ckpt.keep.steps_kept(lambda step: np.bool_(step > 7), steps_of(7, 8), NOW) == {8}  # type: ignore[arg-type, return-value]

    def test_what_it_raises_is_said(self) -> None:
        def broken(step: int) -> bool:
            raise OSError("no such thing")

        for policy in (broken, Answer(lambda steps: 1 // 0)):
            with pytest.raises(InvalidArgumentError, match=r"broken|Answer") as caught:
                ckpt.keep.steps_kept(policy, steps_of(7), NOW)
            assert isinstance(caught.value.__cause__, OSError | ZeroDivisionError)

    def test_it_cannot_change_which_steps_there_are(self) -> None:
        steps = steps_of(1, 2, 3)
        with pytest.raises(InvalidArgumentError, match="AttributeError"):
            ckpt.keep.steps_kept(Answer(lambda given: given.clear()), steps, NOW)
        assert len(steps) == 3

    def test_it_is_asked_with_the_time(self) -> None:
        class Young:
            def keep(self, steps: Sequence[ckpt.keep.SavedStep], now: float) -> set[int]:
                return {saved.step for saved in steps if saved.time > now - 15}

        assert ckpt.keep.steps_kept(Young(), steps_of(1, 2, 3), 30.0) == {3}

    @pytest.mark.parametrize(
        ("policy", "hint"),
        [
            (ckpt.keep.Latest, "pass an instance"),
            (3, "type int"),
            (None, "type NoneType"),
            ("Latest", "type str"),
            ([ckpt.keep.Latest(1)], "Any"),
            (ckpt.save_when.EverySteps(3), "pass it as save_when="),
        ],
    )
    def test_what_is_none_is_refused(self, policy: Any, hint: str) -> None:
        for refused in (ckpt.keep.check_keep_policy, ckpt.keep.Any):
            with pytest.raises(InvalidArgumentError, match="keep policy") as caught:
                refused(policy)
            assert hint in str(caught.value)

    def test_an_async_one_is_refused(self) -> None:
        async def keep(step: int) -> bool:
            return True

        class Slow:
            async def keep(self, steps: Sequence[ckpt.keep.SavedStep], now: float) -> set[int]:
                return set()

        for policy in (keep, Slow()):
            with pytest.raises(InvalidArgumentError, match="async"):
                ckpt.keep.check_keep_policy(policy)

    def test_what_is_one_is_taken(self) -> None:
        for policy in (ckpt.keep.Latest(1), Answer(None), lambda step: True, {1, 2}.__contains__):
            ckpt.keep.check_keep_policy(policy)


WRONG_COUNTS = [0, -1, 1.0, True, None, "3", np.float64(2)]
WRONG_SECONDS = [0, -1, math.nan, math.inf, -math.inf, True, None, "3", 10**400]


@pytest.mark.parametrize("n", WRONG_COUNTS)
def test_counts_that_cannot_be_meant_are_refused(n: Any) -> None:
    for policy in (ckpt.keep.Latest, ckpt.keep.EverySteps, ckpt.keep.ClosestToEvery):
        with pytest.raises(InvalidArgumentError, match=policy.__name__) as caught:
            policy(n)
        assert repr(n) in str(caught.value)
    for policy in (ckpt.keep.EverySteps, ckpt.keep.ClosestToEvery):
        if n is not None:
            with pytest.raises(InvalidArgumentError, match="max_to_keep"):
                policy(1, max_to_keep=n)
    with pytest.raises(InvalidArgumentError, match="exact"):
        ckpt.keep.EverySteps(1, exact=n if n is not True else 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", WRONG_SECONDS)
def test_seconds_that_cannot_be_meant_are_refused(seconds: Any) -> None:
    for policy in (ckpt.keep.EverySeconds, ckpt.keep.Newer):
        with pytest.raises(InvalidArgumentError, match=policy.__name__) as caught:
            policy(seconds)
        assert repr(seconds)[:40] in str(caught.value)


@pytest.mark.parametrize("steps", [3, None, [-1], [1.5], ["a"], "12", [True], [None]])
def test_steps_that_cannot_be_meant_are_refused(steps: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="Steps"):
        ckpt.keep.Steps(steps)


def test_no_member_is_too_few() -> None:
    with pytest.raises(InvalidArgumentError, match=r"Any\(\)"):
        ckpt.keep.Any()
