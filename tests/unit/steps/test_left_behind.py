"""Which steps a run has left behind, for runs that go back as they like."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from ckpt._format.manifest_head import left_behind
from ckpt._steps.index import IndexedStep

# Goes back to a number, or to the latest step (None), and saves so many steps after it.
Legs = list[tuple[int | None, int]]
LEGS = st.lists(st.tuples(st.none() | st.integers(0, 12), st.integers(1, 5)), max_size=6)


def save(step: int, began: int, behind: list[int] | None = None) -> IndexedStep:
    return IndexedStep(step, str(step), "a", began, began, None, left_behind=behind or ())


def newest(found: dict[int, IndexedStep]) -> int:
    behind = left_behind(found.values())
    return max(step for step, each in found.items() if each.created_ns not in behind)


def run(legs: Legs, clock: random.Random) -> tuple[dict[int, IndexedStep], int]:
    """Return what is there in the end, and the step that was saved last."""
    # Hosts may have any time, but no two saves have the same.
    times = (1000 * clock.getrandbits(40) + number for number in itertools.count())
    found = {0: save(0, next(times))}
    step = 0
    for back, count in legs:
        # One that was gone back to may be of a branch that was left before.
        at = newest(found) if back is None else max(each for each in found if each <= back)
        for step in range(at + 1, at + 1 + count):
            behind = [each.created_ns for each in found.values() if each.step > step]
            found[step] = save(step, next(times), behind)
    return found, step


@given(LEGS, st.randoms(use_true_random=False))
def test_what_was_saved_last_is_the_newest_whatever_clocks_say(
    legs: Legs, clock: random.Random
) -> None:
    found, last = run(legs, clock)
    assert newest(found) == last


@given(LEGS, st.randoms(use_true_random=False), st.data())
def test_deleted_steps_never_leave_none_and_the_newest_stays(
    legs: Legs, clock: random.Random, data: st.DataObject
) -> None:
    found, last = run(legs, clock)
    kept = data.draw(st.sets(st.sampled_from(sorted(found))))
    left = {step: each for step, each in found.items() if step in kept}
    if left:
        assert left[min(left)].created_ns not in left_behind(left.values())
    if last in left:
        assert newest(left) == last


@given(st.dictionaries(st.integers(0, 50), st.integers(1, 1 << 60), min_size=1))
def test_where_nothing_is_known_the_number_decides(times: dict[int, int]) -> None:
    found = {step: save(step, began) for step, began in times.items()}
    assert newest(found) == max(found)


@given(LEGS, st.randoms(use_true_random=False))
def test_the_order_of_places_does_not_matter(legs: Legs, clock: random.Random) -> None:
    found, _ = run(legs, clock)
    saves = list(found.values())
    clock.shuffle(saves)
    assert left_behind(saves + saves) == left_behind(found.values())


def test_a_step_that_has_another_number_now_is_not_left_behind_by_greater_ones() -> None:
    assert left_behind([save(1, 7), save(2, 8, [7])]) == set()
