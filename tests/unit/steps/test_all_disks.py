"""The notes on a step whose parts are on several disks, from what each process tells."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt._job.all_disks import common_steps, join_notes, notes_data
from ckpt._steps.index import IndexedStep
from ckpt.keep._health import health_of

NAMES = ("mask", "w", "b")


@st.composite
def parts(draw: st.DrawFn) -> ckpt.keep.SavedStep:
    """A step as it is on one disk; of some, the names of leaves could not be read."""
    nonfinite = tuple(draw(st.lists(st.sampled_from(NAMES), unique=True)))
    unequal = tuple(draw(st.lists(st.sampled_from(NAMES), unique=True)))
    count = draw(st.sampled_from([len(nonfinite), len(nonfinite) or None]))
    is_read = draw(st.booleans())
    return ckpt.keep.SavedStep(
        7, 1.0, None, count, len(unequal), nonfinite * is_read, unequal * is_read
    )


def health_with(parts: list[ckpt.keep.SavedStep], allow: tuple[str, ...]) -> str:
    """The worst that is known of any part."""
    found = {health_of(each, allow) for each in parts}
    return next(each for each in ("unhealthy", "unknown", "healthy") if each in found)


@given(st.lists(parts(), min_size=1, max_size=4), st.lists(st.sampled_from(NAMES), unique=True))
def test_a_step_is_as_healthy_as_the_worst_of_its_parts(
    disks: list[ckpt.keep.SavedStep], allow: list[str]
) -> None:
    every: list[Any] = json.loads(json.dumps([notes_data([each]) for each in disks]))
    found = [join_notes([each], every)[0] for each in disks]
    assert found == [found[0]] * len(disks)
    assert health_of(found[0], allow) == health_with(disks, tuple(allow))
    assert set(found[0].nonfinite) == {name for each in disks for name in each.nonfinite}
    assert (found[0].step, found[0].time) == (7, 1.0)


def test_the_leaves_that_many_steps_have_are_told_once() -> None:
    steps = [ckpt.keep.SavedStep(at, 0.0, None, 2, 0, ("model/a", "model/b")) for at in range(100)]
    assert json.dumps(notes_data(steps)).count("model/a") == 1
    assert join_notes(steps, [notes_data(steps)] * 3) == steps


def test_all_disks_must_have_the_same_save_and_what_one_does_not_know_is_unknown() -> None:
    steps = {at: IndexedStep(at, str(at), "a", 1, 2, None, save="s") for at in (1, 2, 3)}
    here = [[1, "s", [0, 0]], [2, "s", [0, 0]], [3, "s", [0, 0]]]
    there = [[1, "s", [None, 0]], [2, "s", [3, 1]], [3, "of another run", [0, 0]]]
    found = common_steps(steps, [here, there])
    assert list(found.own) == list(found.everywhere) == [1, 2]
    assert found.own == {at: steps[at] for at in (1, 2)}
    notes = [each.notes for each in found.everywhere.values()]
    assert [(it.nonfinite_leaves, it.unequal_leaves) for it in notes] == [(None, 0), (3, 1)]
