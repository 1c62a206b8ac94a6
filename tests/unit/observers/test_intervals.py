"""Arithmetic of intervals, against sets of instants."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ckpt.observers._tracing.timeline import Interval, intersect, measure, merge, pack

# Small numbers, so that intervals often touch, repeat, and are empty or turned round.
INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12)


def instants(intervals: Iterable[Interval]) -> set[int]:
    return {at for began, ended in intervals for at in range(began, ended)}


def is_merged(intervals: list[Interval]) -> bool:
    return all(began < ended for began, ended in intervals) and all(
        left[1] < right[0] for left, right in pairwise(intervals)
    )


@given(INTERVALS)
def test_merging_keeps_every_instant_and_no_overlap(intervals: list[Interval]) -> None:
    merged = merge(intervals)
    assert is_merged(merged)
    assert instants(merged) == instants(intervals)
    assert merge(merged) == merged


@given(INTERVALS, INTERVALS)
def test_an_intersection_is_what_both_have(left: list[Interval], right: list[Interval]) -> None:
    common = intersect(left, right)
    assert is_merged(common)
    assert instants(common) == instants(left) & instants(right)
    assert common == intersect(right, left)


@given(INTERVALS)
def test_a_measure_counts_every_instant_once(intervals: list[Interval]) -> None:
    assert measure(intervals) == len(instants(intervals))


@given(INTERVALS)
def test_packed_rows_hold_no_two_that_overlap(intervals: list[Interval]) -> None:
    upright = [(min(each), max(each)) for each in intervals]
    rows = pack(upright)
    assert len(rows) == len(upright)
    assert set(rows) == set(range(len(set(rows))))
    for row in set(rows):
        own = sorted(each for each, its in zip(upright, rows, strict=True) if its == row)
        assert all(left[1] <= right[0] for left, right in pairwise(own))


@given(INTERVALS)
def test_packing_needs_no_more_rows_than_run_at_once(intervals: list[Interval]) -> None:
    filled = [(began, ended) for began, ended in intervals if began < ended]
    at_once = max((sum(b <= at < e for b, e in filled) for at, _ in filled), default=0)
    assert len(set(pack(filled))) == at_once


def test_what_lies_within_another_is_packed_below_it() -> None:
    assert pack([(2, 4), (0, 9), (0, 5), (9, 12)]) == [2, 0, 1, 0]
