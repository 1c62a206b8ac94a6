"""Which steps are healthy, why others are not, and the one that stays for a run to go back to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import ckpt
from ckpt.errors import InvalidArgumentError
from ckpt.keep._health import allowed_by, check_healthy, health_of, last_resort, why_not_healthy
from tests.unit.policies import reference_policies as model
from tests.unit.policies.reference_policies import ALLOWED, PRESERVATION, saved_steps, with_health

WHOLE = ckpt.keep.SavedStep(1, 0.0, nonfinite_leaves=0)


@given(saved_steps(most=6), ALLOWED)
def test_health_is_what_the_leaves_say(
    steps: list[ckpt.keep.SavedStep], allow: tuple[str, ...]
) -> None:
    for each in steps:
        health = health_of(each, allow)
        assert (health == "healthy") == model.is_healthy(each, allow)
        assert (health == "unhealthy") == model.is_unhealthy(each, allow)
        assert (why_not_healthy(each, allow) == "") == (health == "healthy")


def expected_last(
    steps: list[ckpt.keep.SavedStep], stay: set[int], allow: Any, saved: Any
) -> set[int]:
    """The step that must stay beside `stay`, found by trying all of them."""
    newest = max((each.step for each in steps if each.step in stay), default=None)
    latest = [each for each in steps if each.step in (newest, saved)]
    if not any(model.is_unhealthy(each, allow) for each in latest):
        return set()
    healthy = {each.step for each in steps if model.is_healthy(each, allow)}
    unknown = {each.step for each in steps if not model.is_unhealthy(each, allow)} - healthy
    best = healthy or unknown
    return {max(best)} - stay if best else set()


@given(saved_steps(), st.sets(st.integers(0, 60)), ALLOWED, st.none() | st.integers(0, 60))
@settings(max_examples=300)
def test_the_last_resort_is_the_newest_healthy_step_or_one_of_unknown_health(
    steps: list[ckpt.keep.SavedStep], stay: set[int], allow: tuple[str, ...], saved: int | None
) -> None:
    found = last_resort(steps, stay, allow, saved)
    assert ({found.step} if found else set()) == expected_last(steps, stay, allow, saved)


class RunMachine(RuleBasedStateMachine):
    """A run that goes wrong and recovers, under any policy, while people delete steps."""

    @initialize(policy=PRESERVATION, keeps_latest=st.booleans())
    def begin(self, policy: Any, keeps_latest: bool) -> None:
        self.policy, self.allow = policy, allowed_by(policy)
        self.keeps_latest = keeps_latest
        self.steps: dict[int, ckpt.keep.SavedStep] = {}
        self.before: dict[int, ckpt.keep.SavedStep] = {}

    @rule(data=st.data(), number=st.integers(0, 60))
    def save(self, data: st.DataObject, number: int) -> None:
        """Save a step, mostly but not always a newer one, and delete what is not kept then."""
        saved = data.draw(with_health(ckpt.keep.SavedStep(number, float(number), {"loss": 1.0})))
        self.before = dict(sorted({**self.steps, number: saved}.items()))
        steps = list(self.before.values())
        stay = {number, *ckpt.keep.steps_kept(self.policy, steps, 100.0)}
        stay |= {max(self.before)} if self.keeps_latest else set()
        last = last_resort(steps, stay, self.allow, number)
        stay |= {last.step} if last else set()
        self.steps = {step: each for step, each in self.before.items() if step in stay}

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def somebody_deletes(self, data: st.DataObject) -> None:
        del self.steps[data.draw(st.sampled_from(sorted(self.steps)))]
        self.before = dict(self.steps)

    @invariant()
    def there_is_a_step_to_go_back_to(self) -> None:
        if not self.steps or not model.is_unhealthy(self.steps[max(self.steps)], self.allow):
            return
        healthy = [each for each in self.before.values() if model.is_healthy(each, self.allow)]
        hopeful = [
            each for each in self.before.values() if not model.is_unhealthy(each, self.allow)
        ]
        for best in (healthy, hopeful):
            if best:
                assert best[-1].step in self.steps
                break


TestRuns = RunMachine.TestCase
TestRuns.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)


def test_reasons_name_the_leaves() -> None:
    names = tuple("abcdefg")
    odd = replace(WHOLE, nonfinite_leaves=7, nonfinite=names)
    assert why_not_healthy(odd, []) == (
        "7 leaves have values that are not finite: a, b, c, d, e, ..."
    )
    one = replace(WHOLE, nonfinite_leaves=1, nonfinite=("model:opt.mask",))
    assert why_not_healthy(one, []) == "1 leaf has values that are not finite: model:opt.mask"
    assert why_not_healthy(one, ["**.mask"]) == ""
    unequal = replace(WHOLE, unequal_leaves=2, unequal=("w", "b"))
    assert why_not_healthy(unequal, ["**"]) == "replicas of 2 leaves differ: w, b"
    unknown = why_not_healthy(ckpt.keep.SavedStep(1, 0.0), [])
    assert (
        unknown
        == "its vital signs are not known: save with extensions=[ckpt.extensions.VitalSigns()]"
    )


def test_a_pattern_that_fits_nothing_is_told_with_what_was_probably_meant() -> None:
    odd = replace(WHOLE, nonfinite_leaves=1, nonfinite=("opt.mask",))
    reason = why_not_healthy(odd, ["opt.msk"])
    assert reason.endswith("allow='opt.msk' fits none of its leaves like that (is it 'opt.mask'?)")
    # One that fits is not blamed for a leaf that it does not mean.
    both = replace(WHOLE, nonfinite_leaves=2, nonfinite=("opt.mask", "w"))
    assert why_not_healthy(both, ["opt.mask"]) == "1 leaf has values that are not finite: w"


def test_leaves_whose_names_are_not_known_are_not_allowed() -> None:
    assert health_of(replace(WHOLE, nonfinite_leaves=1), ["**"]) == "unhealthy"
    partly = replace(WHOLE, nonfinite_leaves=2, nonfinite=("w",))
    assert health_of(partly, ["**"]) == "unhealthy"
    assert why_not_healthy(partly, ["**"]) == "1 leaf has values that are not finite"


def test_arrays_without_vital_signs_are_not_made_healthy_by_allowing_others() -> None:
    partly = replace(WHOLE, nonfinite_leaves=1, nonfinite=("mask",), unknown_leaves=2)
    assert health_of(partly, []) == "unhealthy"
    assert health_of(partly, ["mask"]) == "unknown"
    assert why_not_healthy(partly, ["mask"]) == (
        "the vital signs of 2 leaves are not known: save with "
        "extensions=[ckpt.extensions.VitalSigns()]"
    )


def test_a_pattern_may_name_the_item_as_messages_do() -> None:
    names = ("model:layers.0.mask", "ema:layers.0.mask")
    odd = replace(WHOLE, nonfinite_leaves=2, nonfinite=names)
    assert health_of(odd, ["layers.*.mask"]) == "healthy"
    assert health_of(odd, ["model:layers", "ema:**.mask"]) == "healthy"
    assert why_not_healthy(odd, ["model:**.mask"]).endswith("not finite: ema:layers.0.mask")
    # A slash in a key of a leaf is no item.
    haiku = replace(WHOLE, nonfinite_leaves=1, nonfinite=("model:mlp%2Flinear.mask",))
    for pattern in ("mlp/linear.mask", "model:mlp/linear.mask"):
        assert health_of(haiku, [pattern]) == "healthy"
    assert health_of(haiku, ["linear.mask"]) == "unhealthy"


def test_the_patterns_of_all_members_count_for_the_last_resort() -> None:
    policy = ckpt.keep.Any(
        ckpt.keep.Latest(1),
        ckpt.keep.Any(ckpt.keep.Healthy(allow=["a"])),
        ckpt.keep.Healthy(2, ["b", "a"]),
    )
    assert allowed_by(policy) == ("a", "b")
    assert allowed_by(ckpt.keep.Latest(1)) == allowed_by(lambda step: True) == ()


@pytest.mark.parametrize("n", [0, -1, 1.5, True, "2", None])
def test_a_wrong_number_is_refused(n: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"Healthy\(n="):
        ckpt.keep.Healthy(n)


@pytest.mark.parametrize("allow", ["**.mask", b"w", [""], [3], 7, None, [None]])
def test_what_is_no_list_of_patterns_is_refused(allow: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"Healthy\(allow=.*list of patterns"):
        ckpt.keep.Healthy(allow=allow)


@pytest.mark.parametrize("healthy", ["yes", 1, None, ckpt.keep.Healthy, ["**.mask"]])
def test_what_asks_for_no_health_is_refused(healthy: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^healthy=.*expected True, False, or"):
        check_healthy(healthy)


def test_equal_policies_are_equal_and_can_be_compared() -> None:
    assert ckpt.keep.Healthy(1, ["a"]) == ckpt.keep.Healthy(1, ("a",))
    assert repr(ckpt.keep.Healthy(allow=["a"])) == "Healthy(n=1, allow=('a',))"
    assert hash(ckpt.keep.Healthy(allow=["a"])) == hash(ckpt.keep.Healthy(allow=["a"]))
