"""When to save and what to keep."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import InvalidArgumentError
from ckpt.policies import FixedInterval, LatestN, PreserveAll

STEPS = st.lists(st.integers(0, 10**12), unique=True).map(sorted)
COUNTS = st.integers(1, 30)


@given(STEPS, COUNTS)
def test_the_latest_n_are_kept(steps: list[int], n: int) -> None:
    kept = LatestN(n).keep(steps)
    assert len(kept) == min(n, len(steps))
    assert kept <= set(steps)
    assert all(step > max(set(steps) - kept, default=-1) for step in kept)


@given(STEPS)
def test_everything_is_kept(steps: list[int]) -> None:
    assert PreserveAll().keep(steps) == frozenset(steps)


@given(STEPS, COUNTS)
def test_keeping_twice_is_keeping_once(steps: list[int], n: int) -> None:
    kept = LatestN(n).keep(steps)
    assert LatestN(n).keep(sorted(kept)) == kept


@given(st.integers(0, 10**12), COUNTS, STEPS)
def test_multiples_are_saved_whatever_was_saved_before(
    step: int, n: int, previous: list[int]
) -> None:
    refusal = FixedInterval(n).refusal(step, previous)
    if any(step == n * k for k in (step // n,)):
        assert refusal is None
    else:
        assert refusal is not None
        assert str(step) in refusal
        assert str(n) in refusal


def test_the_first_step_is_saved() -> None:
    assert FixedInterval(1000).refusal(0, []) is None


@pytest.mark.parametrize("policy", [LatestN, FixedInterval])
@pytest.mark.parametrize("n", [0, -1, 1.0, True, None, "3"])
def test_a_count_that_cannot_be_meant_is_refused(policy: Any, n: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=policy.__name__) as caught:
        policy(n)
    assert repr(n) in str(caught.value)


@pytest.mark.parametrize("policy", [LatestN(3), FixedInterval(3), PreserveAll()])
def test_policies_are_values(policy: Any) -> None:
    same = type(policy)(*([3] if hasattr(policy, "n") else []))
    assert policy == same
    assert hash(policy) == hash(same)
    with pytest.raises((AttributeError, TypeError)):
        policy.n = 4
