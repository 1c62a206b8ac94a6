"""The search for where two runs part, beside a look at every step."""

from __future__ import annotations

import math

import anyio
from hypothesis import example, given
from hypothesis import strategies as st

from ckpt._inspection.divergence import DivergencePoint, find_divergence

Row = list[bool | None]


def searched(row: Row, *, in_order: bool) -> tuple[DivergencePoint, list[int]]:
    """Return what a search finds, and the places that it looked at."""
    seen: list[int] = []

    async def look(place: int) -> bool | None:
        seen.append(place)
        return row[place]

    async def search() -> DivergencePoint:
        return await find_divergence(len(row), look, in_order=in_order)

    return anyio.run(search), seen


def first_different(row: Row) -> int:
    return row.index(False) if False in row else len(row)


def last_same(row: Row) -> int:
    """The last place that is the same, of those before the first that is not."""
    before = row[: first_different(row)]
    return max((place for place, is_same in enumerate(before) if is_same), default=-1)


@st.composite
def runs_that_stay_apart(draw: st.DrawFn) -> Row:
    count = draw(st.integers(0, 40))
    parting = draw(st.integers(0, count))
    unknown = draw(st.sets(st.integers(0, max(count - 1, 0)), max_size=6))
    return [None if place in unknown else place < parting for place in range(count)]


@given(runs_that_stay_apart())
@example([])
@example([None] * 5)
@example([True, None, None, False])
def test_halving_finds_what_a_look_at_every_step_finds(row: Row) -> None:
    found, seen = searched(row, in_order=False)
    assert found.first_different == first_different(row)
    assert found.last_same == last_same(row)
    assert len(set(seen)) == len(seen) == found.looked_at
    assert len(seen) <= math.ceil(math.log2(len(row) + 1)) + row.count(None)


ROWS = st.lists(st.sampled_from([True, False, None]), max_size=30)


@given(ROWS)
def test_in_order_is_right_for_runs_that_come_together_again(row: Row) -> None:
    found, seen = searched(row, in_order=True)
    assert (found.first_different, found.last_same) == (first_different(row), last_same(row))
    assert seen == list(range(min(first_different(row) + 1, len(row))))


@given(ROWS)
def test_what_halving_says_of_two_steps_is_true_of_them(row: Row) -> None:
    found, seen = searched(row, in_order=False)
    low, high = found.last_same, found.first_different
    assert -1 <= low < high <= len(row)
    assert low == -1 or row[low] is True
    assert high == len(row) or row[high] is False
    # Nothing between them is known, and all of it was looked at.
    between = range(low + 1, high)
    assert all(row[place] is None for place in between)
    assert set(between) <= set(seen)
