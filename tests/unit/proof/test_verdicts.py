"""Verdicts: what follows from which leaves, parts and steps differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt._proof.state_marks import StateMark
from ckpt._proof.state_pass import StatePass
from ckpt._proof.verdicts import difference

WEIGHTS = {name: np.linspace(1, 2, 64, dtype=np.float32) * n for n, name in enumerate("abcd", 1)}
STATE: dict[str, Any] = {
    **WEIGHTS,
    "step": 3,
    "rng": jax.random.key(0),
    "name": "x",
    "zeros": np.zeros(4),
}
PASS = StatePass()


def marked(state: Mapping[str, Any], step: int = 7) -> StateMark:
    mark, unequal = PASS.begin(step, dict(state)).finish()
    assert not unequal
    return mark


BEFORE = marked(STATE)
# What the step has changed: each array by a tenth.
SINCE = marked({**STATE, **{name: array * 0.9 for name, array in WEIGHTS.items()}})


def test_equal_states_have_no_difference() -> None:
    assert difference(BEFORE, marked({**STATE, "a": STATE["a"].copy()})) is None


@given(st.sets(st.sampled_from("abcd"), min_size=1), st.floats(1e-7, 1e-6))
def test_only_most_floats_together_are_rounded(leaves: set[str], size: float) -> None:
    noise = np.random.default_rng(0).normal(size=64).astype(np.float32)
    changed = {name: WEIGHTS[name] + noise * size * 4 for name in leaves}
    found = difference(BEFORE, marked({**STATE, **changed}), since=SINCE)
    assert found is not None
    assert set(found.leaves) == leaves
    assert found.is_rounding == (len(leaves) >= 2)


@given(st.sampled_from("abcd"), st.integers(0, 63), st.sampled_from([0.01, 1.0, np.nan, np.inf]))
def test_the_leaf_with_the_greatest_change_is_named_first(
    leaf: str, place: int, change: float
) -> None:
    changed = {name: array * np.float32(1 + 1e-6) for name, array in WEIGHTS.items()}
    changed[leaf] = WEIGHTS[leaf].copy()
    changed[leaf][place] += np.float32(change)
    found = difference(BEFORE, marked({**STATE, **changed}))
    assert found is not None
    if change == 1.0:
        assert found.leaves[0] == leaf
    assert leaf in found.leaves


@pytest.mark.parametrize(
    ("changes", "follows_equal", "cause"),
    [
        ({"rng": jax.random.key(1)}, False, "the random key rng differs"),
        ({"rng": jax.random.key(1), "step": 4}, False, "the state is of another step, or was not"),
        ({"step": 0}, False, "only a counter differs (step is 0 and was 3)"),
        (
            {"step": 4, "a": STATE["b"]},
            False,
            "a counter differs, too (step is 4 and was 3): the state",
        ),
        ({"a": STATE["b"], "b": STATE["a"]}, False, "changed places: a has the values of b"),
        ({"c": STATE["c"] * 2}, False, "only some leaves in c differ: they were not restored"),
        ({"name": "y"}, False, "only some leaves in name differ: they were not restored"),
        ({"c": STATE["c"] * 2}, True, "the state was the same at the mark before"),
        ({n: a * 2 for n, a in WEIGHTS.items()}, True, "computed otherwise"),
        ({n: a * 2 for n, a in WEIGHTS.items()}, False, "the state is of another step"),
        ({"a": WEIGHTS["a"].astype(np.float16)}, False, "a is float16[64] and was float32[64]"),
        ({"more": 1}, False, "more is new"),
    ],
)
def test_the_cause_follows_from_what_differs(
    changes: dict[str, Any], follows_equal: bool, cause: str
) -> None:
    found = difference(BEFORE, marked({**STATE, **changes}), follows_equal=follows_equal)
    assert found is not None
    assert cause in found.cause
    assert not found.is_rounding
    assert found.step == 7


def test_what_was_restored_is_not_rounded() -> None:
    changed = {name: array * np.float32(1 + 1e-6) for name, array in WEIGHTS.items()}
    found = difference(BEFORE, marked({**STATE, **changed}))
    assert found is not None
    assert not found.is_rounding


@pytest.mark.parametrize(
    "value", [jnp.int8(-4), jnp.uint8(252), jnp.int32(-7), jnp.uint32(4000000001), np.int64(-5), 3]
)
def test_a_counter_is_shown_as_it_is(value: Any) -> None:
    mark = marked({"n": value})
    assert mark.leaves["value"].tolist() == [int(value)]


def test_functions_are_no_values() -> None:
    one, two = ({"f": function, "w": jnp.ones(2)} for function in (lambda: 1, lambda: 2))
    assert difference(marked(one), marked(two)) is None
