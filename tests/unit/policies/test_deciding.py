"""When to save."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt.errors import InvalidArgumentError, StorageError
from tests.unit.policies import reference_policies as model
from tests.unit.policies.reference_policies import SAVING, SIMPLE_SAVING, contexts, saved_steps

NONE: list[ckpt.keep.SavedStep] = []
ONE = [ckpt.keep.SavedStep(7, 100.0)]


class Untouched(Sequence[ckpt.keep.SavedStep]):
    """Committed steps that nobody may look at, except where `allowed` says so."""

    def __init__(self, steps: Sequence[ckpt.keep.SavedStep] = (), allowed: str = "") -> None:
        self.steps = steps
        self.allowed = allowed

    def __len__(self) -> int:
        assert "length" in self.allowed
        return len(self.steps)

    @overload
    def __getitem__(self, place: int) -> ckpt.keep.SavedStep: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[ckpt.keep.SavedStep]: ...
    def __getitem__(self, place: Any) -> Any:
        assert "newest" in self.allowed
        assert place == -1
        return self.steps[place]


@pytest.mark.parametrize("kind", range(len(SIMPLE_SAVING)))
@given(st.data())
def test_each_policy_wants_what_it_promises(kind: int, data: st.DataObject) -> None:
    policy = data.draw(SIMPLE_SAVING[kind])
    step, previous = data.draw(st.integers(0, 60)), data.draw(saved_steps(3))
    context = data.draw(contexts())
    refusal = ckpt.save_when.refusal_of(policy, step, previous, context)
    assert (refusal is None) == model.is_saved(policy, step, previous, context)


@given(SAVING, st.integers(0, 60), saved_steps(3), contexts())
def test_compositions_want_what_any_member_wants(
    policy: Any, step: int, previous: list[ckpt.keep.SavedStep], context: ckpt.save_when.SaveContext
) -> None:
    before = list(previous)
    refusal = ckpt.save_when.refusal_of(policy, step, previous, context)
    assert (refusal is None) == model.is_saved(policy, step, previous, context)
    assert refusal == ckpt.save_when.refusal_of(policy, step, previous, context)
    assert previous == before


@pytest.mark.parametrize(
    ("policy", "step", "context", "why"),
    [
        (
            ckpt.save_when.EverySteps(3),
            7,
            ckpt.save_when.SaveContext(0.0),
            "step 7 is not a multiple of 3 (EverySteps)",
        ),
        (
            ckpt.save_when.Steps([1, 2]),
            7,
            ckpt.save_when.SaveContext(0.0),
            "step 7 is not one of the 2 steps (Steps)",
        ),
        (
            ckpt.save_when.Continuously(),
            7,
            ckpt.save_when.SaveContext(0.0, saving=(ckpt.keep.SavedStep(5, 0.0),)),
            "step 5 is still being saved (Continuously)",
        ),
        (
            ckpt.save_when.Continuously(60),
            7,
            ckpt.save_when.SaveContext(104.5, last_time=100.0),
            "the last save began 4.5 s ago, less than 60 s (Continuously)",
        ),
        (
            ckpt.save_when.EverySeconds(60),
            7,
            ckpt.save_when.SaveContext(104.5),
            "the last save began 4.5 s ago, less than 60 s (EverySeconds)",
        ),
        (
            ckpt.save_when.First(),
            7,
            ckpt.save_when.SaveContext(0.0),
            "there is a committed step already (First)",
        ),
        (
            ckpt.save_when.First(),
            7,
            ckpt.save_when.SaveContext(0.0, saving=(ckpt.keep.SavedStep(5, 0.0),)),
            "step 5 is being saved already (First)",
        ),
        (
            ckpt.save_when.Preempted(),
            7,
            ckpt.save_when.SaveContext(0.0),
            "the run is not preempted (Preempted)",
        ),
        (
            ckpt.save_when.Any(
                ckpt.save_when.EverySteps(2),
                ckpt.save_when.Preempted(),
                lambda step, previous, context: False,
            ),
            7,
            ckpt.save_when.SaveContext(0.0),
            (
                "step 7 is not a multiple of 2 (EverySteps); the run is not preempted "
                "(Preempted); <lambda> returned False for step 7"
            ),
        ),
        (
            ckpt.save_when.BoundedOverhead(0.1),
            7,
            ckpt.save_when.SaveContext(104.0, step_seconds=0.5, lost_seconds=0.5, save_seconds=1.0),
            (
                "the last save began 4.0 s ago; the next one is due after 5.0 s, as one costs "
                "0.5 s and 0.1 of the time may be lost (BoundedOverhead)"
            ),
        ),
        (
            ckpt.save_when.BoundedOverhead(),
            7,
            ckpt.save_when.SaveContext(104.0, saving=(ckpt.keep.SavedStep(5, 0.0),)),
            "step 5 is still being saved (BoundedOverhead)",
        ),
    ],
)
def test_a_refusal_says_why(
    policy: Any, step: int, context: ckpt.save_when.SaveContext, why: str
) -> None:
    assert ckpt.save_when.refusal_of(policy, step, ONE, context) == why


@given(st.booleans(), st.integers(0, 200), st.integers(1, 10**6))
def test_a_clock_that_was_set_back_does_not_stop_saving(known: bool, last: int, back: int) -> None:
    """Who waits for time to pass saves at once if the last save began in the future."""
    context = ckpt.save_when.SaveContext(
        float(last - back),
        last_time=float(last) if known else None,
        step_seconds=1.0,
        lost_seconds=5.0,
        save_seconds=1e9,
    )
    previous = [ckpt.keep.SavedStep(3, 0.0 if known else float(last))]
    for timed in (
        ckpt.save_when.EverySeconds(60),
        ckpt.save_when.Continuously(60),
        ckpt.save_when.BoundedOverhead(0.01),
    ):
        assert ckpt.save_when.refusal_of(timed, 4, previous, context) is None


def test_a_save_is_due_when_the_time_is_over_and_not_before() -> None:
    for policy in (ckpt.save_when.EverySeconds(60), ckpt.save_when.Continuously(60)):
        assert (
            ckpt.save_when.refusal_of(policy, 4, ONE, ckpt.save_when.SaveContext(159.9)) is not None
        )
        assert ckpt.save_when.refusal_of(policy, 4, ONE, ckpt.save_when.SaveContext(160.0)) is None


class TestWhatIsLookedAt:
    """Committed steps are read when they are looked at, so it is better not to."""

    @pytest.mark.parametrize(
        "policy",
        [
            ckpt.save_when.EverySteps(3),
            ckpt.save_when.Steps([1]),
            ckpt.save_when.Continuously(),
            ckpt.save_when.Preempted(),
            ckpt.save_when.BoundedOverhead(),
            ckpt.save_when.Any(ckpt.save_when.EverySteps(3), ckpt.save_when.Continuously()),
            # The first one that wants it decides.
            ckpt.save_when.Any(
                ckpt.save_when.EverySteps(1), ckpt.save_when.First(), ckpt.save_when.EverySeconds(3)
            ),
        ],
    )
    def test_policies_of_the_step_look_at_nothing(self, policy: Any) -> None:
        for step in range(5):
            ckpt.save_when.refusal_of(policy, step, Untouched(), ckpt.save_when.SaveContext(0.0))

    @pytest.mark.parametrize(
        "policy",
        [
            ckpt.save_when.EverySeconds(3),
            ckpt.save_when.Continuously(3),
            ckpt.save_when.BoundedOverhead(),
        ],
    )
    def test_policies_of_the_time_look_at_the_newest_if_there_was_no_save(
        self, policy: Any
    ) -> None:
        measured: dict[str, Any] = {"step_seconds": 1.0, "lost_seconds": 1.0, "save_seconds": 1.0}
        known = ckpt.save_when.SaveContext(1000.0, last_time=999.0, **measured)
        assert ckpt.save_when.refusal_of(policy, 8, Untouched(), known) is not None
        first = ckpt.save_when.SaveContext(101.0, **measured)
        assert (
            ckpt.save_when.refusal_of(policy, 8, Untouched(ONE, "length newest"), first) is not None
        )
        assert ckpt.save_when.refusal_of(policy, 8, Untouched([], "length"), first) is None

    def test_the_first_save_is_made_if_there_is_nothing(self) -> None:
        assert (
            ckpt.save_when.refusal_of(
                ckpt.save_when.First(), 8, Untouched([], "length"), ckpt.save_when.SaveContext(0.0)
            )
            is None
        )
        assert ckpt.save_when.refusal_of(
            ckpt.save_when.First(), 8, Untouched(ONE, "length"), ckpt.save_when.SaveContext(0.0)
        )

    def test_a_save_under_way_is_enough_to_know(self) -> None:
        saving = ckpt.save_when.SaveContext(0.0, saving=(ckpt.keep.SavedStep(5, 0.0),))
        for policy in (
            ckpt.save_when.First(),
            ckpt.save_when.Continuously(9),
            ckpt.save_when.BoundedOverhead(),
        ):
            assert ckpt.save_when.refusal_of(policy, 8, Untouched(), saving) is not None


class Answer:
    """A policy that answers anything."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def refusal(
        self,
        step: int,
        previous: Sequence[ckpt.keep.SavedStep],
        context: ckpt.save_when.SaveContext,
    ) -> Any:
        return self.answer

    def __repr__(self) -> str:
        return "Answer()"


class TestPoliciesOfOthers:
    @pytest.mark.parametrize("answer", [True, False, 0, 1, b"no", ["no"], object()])
    def test_a_policy_answers_a_sentence_or_none(self, answer: Any) -> None:
        for policy in (
            Answer(answer),
            ckpt.save_when.Any(ckpt.save_when.Preempted(), Answer(answer)),
        ):
            with pytest.raises(InvalidArgumentError, match=r"Answer\(\)") as caught:
                ckpt.save_when.refusal_of(policy, 3, NONE, ckpt.save_when.SaveContext(0.0))
            assert repr(answer) in str(caught.value)
        assert (
            ckpt.save_when.refusal_of(Answer(None), 3, NONE, ckpt.save_when.SaveContext(0.0))
            is None
        )
        assert (
            ckpt.save_when.refusal_of(Answer("too hot"), 3, NONE, ckpt.save_when.SaveContext(0.0))
            == "too hot"
        )

    def test_an_empty_reason_is_one(self) -> None:
        assert (
            ckpt.save_when.refusal_of(Answer(""), 3, NONE, ckpt.save_when.SaveContext(0.0))
            == "Answer() does not want step 3"
        )

    @pytest.mark.parametrize("answer", [None, 0, 1, "yes", [], np.int64(1), np.array([True])])
    def test_a_function_answers_true_or_false(self, answer: Any) -> None:
        def chosen(
            step: int, previous: Sequence[ckpt.keep.SavedStep], context: ckpt.save_when.SaveContext
        ) -> Any:
            return answer

        for policy in (chosen, ckpt.save_when.Any(chosen)):
            with pytest.raises(InvalidArgumentError, match="chosen") as caught:
                ckpt.save_when.refusal_of(policy, 3, NONE, ckpt.save_when.SaveContext(0.0))
            assert repr(answer) in str(caught.value)

    @pytest.mark.parametrize("true", [True, np.True_, np.bool_(1), np.array(True)])
    def test_booleans_of_numpy_will_do(self, true: Any) -> None:
        assert (
            ckpt.save_when.refusal_of(lambda *_: true, 3, NONE, ckpt.save_when.SaveContext(0.0))
            is None
        )
        assert ckpt.save_when.refusal_of(
            lambda *_: ~true if true is not True else False, 3, NONE, ckpt.save_when.SaveContext(0)
        )

    def test_a_function_is_given_all_there_is(self) -> None:
        seen: list[Any] = []

        def chosen(
            step: int, previous: Sequence[ckpt.keep.SavedStep], context: ckpt.save_when.SaveContext
        ) -> bool:
            seen.append((step, previous, context))
            return True

        context = ckpt.save_when.SaveContext(5.0)
        assert ckpt.save_when.refusal_of(chosen, 3, ONE, context) is None
        assert seen == [(3, ONE, context)]

    def test_what_it_raises_is_said(self) -> None:
        def broken(
            step: int, previous: Sequence[ckpt.keep.SavedStep], context: ckpt.save_when.SaveContext
        ) -> bool:
            raise KeyError("loss")

        with pytest.raises(
            InvalidArgumentError, match=r"broken.* raised KeyError: 'loss'"
        ) as caught:
            ckpt.save_when.refusal_of(broken, 3, NONE, ckpt.save_when.SaveContext(0.0))
        assert isinstance(caught.value.__cause__, KeyError)

    def test_what_the_library_raises_while_steps_are_read_is_passed_on(self) -> None:
        def looks(
            step: int, previous: Sequence[ckpt.keep.SavedStep], context: ckpt.save_when.SaveContext
        ) -> bool:
            raise StorageError("the store is gone")

        with pytest.raises(StorageError, match="gone"):
            ckpt.save_when.refusal_of(
                ckpt.save_when.Any(looks), 3, NONE, ckpt.save_when.SaveContext(0.0)
            )

    @pytest.mark.parametrize(
        ("policy", "hint"),
        [
            (ckpt.save_when.EverySteps, "pass an instance: EverySteps(...)"),
            (ckpt.keep.Latest, "pass it as keep="),
            (ckpt.keep.Latest(3), "pass it as keep="),
            (100, "type int"),
            (None, "type NoneType"),
            ("EverySteps", "type str"),
            ([ckpt.save_when.EverySteps(3)], "Any"),
        ],
    )
    def test_what_is_none_is_refused(self, policy: Any, hint: str) -> None:
        for refused in (ckpt.save_when.check_save_policy, ckpt.save_when.Any):
            with pytest.raises(InvalidArgumentError, match="save policy") as caught:
                refused(policy)
            assert hint in str(caught.value)

    def test_an_async_one_is_refused(self) -> None:
        async def chosen(
            step: int, previous: Sequence[ckpt.keep.SavedStep], context: ckpt.save_when.SaveContext
        ) -> bool:
            return True

        class Slow:
            async def refusal(self, *arguments: Any) -> str | None:
                return None

        for policy in (chosen, Slow()):
            with pytest.raises(InvalidArgumentError, match="async"):
                ckpt.save_when.check_save_policy(policy)
        # Hidden in a function it is found when it is asked, without a warning later.
        with pytest.raises(InvalidArgumentError, match="coroutine"):
            ckpt.save_when.refusal_of(
                lambda *a: chosen(*a),  # type: ignore[arg-type]
                3,
                NONE,
                ckpt.save_when.SaveContext(0.0),
            )

    def test_what_is_one_is_taken(self) -> None:
        for policy in (ckpt.save_when.EverySteps(1), Answer(None), lambda *_: True):
            ckpt.save_when.check_save_policy(policy)


@pytest.mark.parametrize("n", [0, -1, 1.0, True, None, "3"])
def test_counts_that_cannot_be_meant_are_refused(n: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="EverySteps") as caught:
        ckpt.save_when.EverySteps(n)
    assert repr(n) in str(caught.value)


@pytest.mark.parametrize("seconds", [-1, math.nan, math.inf, True, None, "3", 10**400])
def test_seconds_that_cannot_be_meant_are_refused(seconds: Any) -> None:
    for refused in (
        lambda: ckpt.save_when.EverySeconds(seconds),
        lambda: ckpt.save_when.Continuously(minimum_interval_seconds=seconds),
        lambda: ckpt.save_when.BoundedOverhead(at_least_seconds=seconds),
        lambda: ckpt.save_when.BoundedOverhead(at_most_seconds=-1 if seconds is None else seconds),
    ):
        with pytest.raises(InvalidArgumentError, match="seconds"):
            refused()
    assert ckpt.save_when.Continuously(0) == ckpt.save_when.Continuously()
    with pytest.raises(InvalidArgumentError, match="above 0"):
        ckpt.save_when.EverySeconds(0)


@pytest.mark.parametrize("fraction", [0, 0.0, 1, 1.0, -0.1, 3, math.nan, None, "3%", True])
def test_shares_that_cannot_be_meant_are_refused(fraction: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="fraction") as caught:
        ckpt.save_when.BoundedOverhead(fraction)
    assert repr(fraction) in str(caught.value)


def test_bounds_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"at_least_seconds=5.*at_most_seconds=4"):
        ckpt.save_when.BoundedOverhead(at_least_seconds=5, at_most_seconds=4)


@pytest.mark.parametrize("steps", [3, None, [-1], [1.5], ["a"], "12", [True]])
def test_steps_that_cannot_be_meant_are_refused(steps: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="Steps"):
        ckpt.save_when.Steps(steps)


@pytest.mark.parametrize("steps", [[1, 5], (5, 1), {1, 5}, iter([1, 5]), np.array([1, 5])])
def test_steps_come_as_any_collection(steps: Any) -> None:
    assert ckpt.save_when.Steps(steps) == ckpt.save_when.Steps([1, 5, 1])
    assert ckpt.save_when.Steps(range(1, 9, 4)).steps == {1, 5}


def test_no_member_is_too_few() -> None:
    with pytest.raises(InvalidArgumentError, match=r"Any\(\)"):
        ckpt.save_when.Any()


MAKERS = [
    lambda: ckpt.save_when.EverySteps(3),
    lambda: ckpt.save_when.Steps([1, 2]),
    lambda: ckpt.save_when.Continuously(3.5),
    lambda: ckpt.save_when.EverySeconds(3),
    lambda: ckpt.save_when.First(),
    lambda: ckpt.save_when.Preempted(),
    lambda: ckpt.save_when.BoundedOverhead(0.1, 1, 2),
    lambda: ckpt.save_when.Any(ckpt.save_when.First(), ckpt.save_when.EverySteps(3)),
    lambda: ckpt.keep.All(),
    lambda: ckpt.keep.Latest(3),
    lambda: ckpt.keep.EverySteps(3, exact=False),
    lambda: ckpt.keep.ClosestToEvery(3),
    lambda: ckpt.keep.EverySeconds(3),
    lambda: ckpt.keep.Newer(3),
    lambda: ckpt.keep.Best(3, "loss", "min"),
    lambda: ckpt.keep.Steps([3]),
    lambda: ckpt.keep.Any(ckpt.keep.Latest(3), ckpt.keep.Steps([3])),
    lambda: ckpt.keep.Deletion(2, "trash"),
]


@pytest.mark.parametrize("make", MAKERS)
def test_policies_are_values(make: Any) -> None:
    policy = make()
    assert policy == make()
    assert hash(policy) == hash(make())
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert copy.deepcopy(policy) == policy
    assert repr(policy).startswith(type(policy).__name__ + "(")
    home = ckpt.save_when if hasattr(policy, "refusal") else ckpt.keep
    assert eval(re.sub(r"<Signals\.\w+: (\d+)>", r"\1", repr(policy)), dict(vars(home))) == policy
    for name in ("n", "steps", "policies", "anything"):
        with pytest.raises((AttributeError, TypeError)):
            setattr(policy, name, 4)
