"""What is kept where each item has a policy of its own, against the plain rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt import errors
from ckpt.keep._by_item import Leaving, leaving, pattern_of, text_of, unused_patterns
from tests.unit.policies import reference_policies as model

ITEMS = ["params", "opt_state", "ema_fast", "ema_slow", "rng"]
PATTERNS = [*ITEMS, "*", "ema_*", "*_state", "*a*", "p*"]
RULES = st.dictionaries(st.sampled_from(PATTERNS), model.PRESERVATION, min_size=1, max_size=4)


def steps_of(draw: st.DataObject) -> tuple[list[ckpt.keep.SavedStep], dict[int, set[str]]]:
    numbers = sorted(draw.draw(st.sets(st.integers(0, 40), max_size=12)))
    losses = draw.draw(st.lists(st.integers(0, 9), min_size=len(numbers), max_size=len(numbers)))
    steps = [
        ckpt.keep.SavedStep(number, 100.0 * number, {"loss": float(loss), "accuracy": -float(loss)})
        for number, loss in zip(numbers, losses, strict=True)
    ]
    # A step of which nothing is known has no items here.
    some = st.sets(st.sampled_from(ITEMS), max_size=len(ITEMS))
    return steps, {number: draw.draw(some) for number in numbers}


def rule_of(item: str, rules: Mapping[str, Any]) -> Any:
    """The rule once more: the name, a pattern in the order given, all others."""
    if item in rules:
        return rules[item]
    meant = {
        "ema_*": item.startswith("ema_"),
        "*_state": item.endswith("_state"),
        "*a*": "a" in item,
        "p*": item.startswith("p"),
    }
    first = next((policy for pattern, policy in rules.items() if meant.get(pattern)), None)
    return first or rules.get("*")


def plain(
    rules: Mapping[str, Any],
    steps: list[ckpt.keep.SavedStep],
    items: Mapping[int, set[str]],
    now: float,
    always: set[int],
) -> dict[int, set[str]]:
    """Return what stays of every step, item by item; a step with nothing left is not there."""
    left: dict[int, set[str]] = {}
    for one in steps:
        stays = set()
        for item in items[one.step]:
            policy = rule_of(item, rules)
            having = [each for each in steps if item in items[each.step]]
            is_kept = policy is None or one.step in model.kept(policy, having, now)
            if is_kept or one.step in always:
                stays.add(item)
        if stays or not items[one.step]:
            left[one.step] = stays
    return left


def remaining(
    found: Leaving, steps: list[ckpt.keep.SavedStep], items: Mapping[int, set[str]]
) -> dict[int, set[str]]:
    return {
        each.step: items[each.step] - set(found.items.get(each.step, ()))
        for each in steps
        if each.step not in found.steps
    }


@given(st.data(), RULES, st.integers(0, 5000))
def test_each_item_is_kept_as_if_it_were_alone(
    data: st.DataObject, rules: dict[str, Any], now: int
) -> None:
    steps, items = steps_of(data)
    always = data.draw(st.sets(st.sampled_from([0, *items]), max_size=2))
    found = leaving(rules, steps, items, float(now), always)
    left = remaining(found, steps, items)
    assert left == plain(rules, steps, items, float(now), always)
    # What goes is told with the policy that did not keep it.
    for step, gone in found.items.items():
        assert gone.keys() <= items[step]
        assert (gone.keys() == items[step]) == (step in found.steps)
        assert all(text == text_of(rule_of(item, rules)) for item, text in gone.items())
    for step in always & items.keys():
        assert left[step] == items[step]


@given(st.data(), RULES, st.integers(0, 5000))
def test_what_is_left_stays_when_it_is_asked_again(
    data: st.DataObject, rules: dict[str, Any], now: int
) -> None:
    steps, items = steps_of(data)
    always = {steps[-1].step} if steps else set()
    left = remaining(leaving(rules, steps, items, float(now), always), steps, items)
    rest = [each for each in steps if each.step in left]
    again = leaving(rules, rest, left, float(now), always)
    assert again == Leaving(frozenset(), {})


@given(st.data(), model.PRESERVATION, st.integers(0, 5000))
def test_one_policy_for_all_items_is_that_policy(
    data: st.DataObject, policy: Any, now: int
) -> None:
    """Of steps that all have the same items."""
    steps, _ = steps_of(data)
    items = {each.step: set(ITEMS[:2]) for each in steps}
    found = leaving({"*": policy}, steps, items, float(now))
    numbers = {each.step for each in steps}
    assert numbers - found.steps == ckpt.keep.steps_kept(policy, steps, float(now))
    assert found.items.keys() == found.steps


def test_the_name_goes_before_patterns_and_the_star_alone_comes_last() -> None:
    patterns = ["*", "ema_*", "*_fast", "ema_slow"]
    assert pattern_of("ema_slow", patterns) == "ema_slow"
    assert pattern_of("ema_fast", patterns) == "ema_*"
    assert pattern_of("net_fast", patterns) == "*_fast"
    assert pattern_of("rng", patterns) == "*"
    assert pattern_of("rng", patterns[1:]) is None
    # A dot is a dot.
    assert pattern_of("axb", ["a.b", "a.*"]) is None


def test_patterns_that_decide_nothing_are_found() -> None:
    rules = dict.fromkeys(["params", "par*", "ema_*", "*"], ckpt.keep.Latest(1))
    assert unused_patterns(rules, ["params", "rng"]) == ["par*", "ema_*"]
    assert unused_patterns(rules, ["params", "parts", "ema_1"]) == []


def test_a_policy_is_told_as_a_program_writes_it() -> None:
    texts: dict[str, Any] = {
        "Latest(3)": ckpt.keep.Latest(3),
        "EverySteps(1000)": ckpt.keep.EverySteps(1000),
        "EverySteps(5, exact=False)": ckpt.keep.EverySteps(5, exact=False),
        "Best(2, metric='loss', mode='min')": ckpt.keep.Best(2, "loss", "min"),
        "Any(Latest(2), All())": ckpt.keep.Any(ckpt.keep.Latest(2), ckpt.keep.All()),
    }
    for text, policy in texts.items():
        assert text_of(policy) == text
    assert text_of(odd) == "odd"
    assert len(text_of(ckpt.keep.Steps(range(10_000)))) < 200


def odd(step: int) -> bool:
    return step % 2 == 1


class Half:
    def keep(self, steps: Any, now: float) -> Any:
        return [steps]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "keep={}: expected at least one item"),
        ({"params": 3}, "policy of the items 'params' 3: expected one of ckpt.keep"),
        ({"params": None}, "of the items 'params' None"),
        ({"params": ckpt.keep.Latest}, "it is a class; pass an instance"),
        ({"params": [ckpt.keep.Latest(1)]}, "pass several as Any"),
        ({"params": ckpt.save_when.EverySteps(3)}, "this is a save policy"),
        ({"params": {"*": ckpt.keep.Latest(1)}}, "of the items 'params' {'*': Latest(n=1)}"),
        ({"": ckpt.keep.Latest(1)}, "keep={'': ...}: expected the name of an item"),
        ({"a/b": ckpt.keep.Latest(1)}, "keep={'a/b': ...}"),
        ({3: ckpt.keep.Latest(1)}, "keep={3: ...}"),
        ({"params": ckpt.keep.Latest(1), "[ab]": ckpt.keep.Latest(1)}, "keep={'[ab]': ...}"),
    ],
)
def test_what_is_no_policy_for_items_is_told(given: Any, text: str) -> None:
    with pytest.raises(errors.InvalidArgumentError) as caught:
        ckpt.keep.check_keep_policy(given)
    assert text in str(caught.value)


def test_a_mapping_is_no_member_of_a_policy() -> None:
    with pytest.raises(errors.InvalidArgumentError, match="expected one of"):
        ckpt.keep.Any({"*": ckpt.keep.Latest(1)})  # type: ignore[arg-type]


def test_a_wrong_answer_lets_nothing_go() -> None:
    steps = [ckpt.keep.SavedStep(1, 0.0), ckpt.keep.SavedStep(2, 1.0)]
    with pytest.raises(errors.InvalidArgumentError, match="Nothing was deleted"):
        leaving({"*": Half()}, steps, {1: ["a"], 2: ["a"]}, 0.0)


def test_the_best_step_is_found_in_the_policies_of_items() -> None:
    best = ckpt.keep.Best(1, "loss", "min")
    assert ckpt.keep.ranking_of({"params": best, "*": ckpt.keep.Latest(1)}) == best
    assert ckpt.keep.ranking_of({"params": best, "*": ckpt.keep.Best(1, "loss", "max")}) is None
