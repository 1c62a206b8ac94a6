"""Intervals of time and their arithmetic. Pure.

An interval `(began, ended)` contains the instants from `began` up to, but not including, `ended`.
It is empty if it ends no later than it began. The functions take intervals in any order,
overlapping or not, and return them *merged*: ascending, not empty, not touching each other.
"""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[int, int]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of `intervals`."""
    merged: list[Interval] = []
    for began, ended in sorted(intervals):
        if ended <= began:
            continue
        if merged and began <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], ended))
        else:
            merged.append((began, ended))
    return merged


def intersect(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """Return the intersection of the union of `left` with the union of `right`."""
    ours, theirs = merge(left), merge(right)
    common: list[Interval] = []
    i = j = 0
    while i < len(ours) and j < len(theirs):
        began = max(ours[i][0], theirs[j][0])
        ended = min(ours[i][1], theirs[j][1])
        if began < ended:
            common.append((began, ended))
        # The interval that ends first overlaps nothing further on the other side.
        if ours[i][1] < theirs[j][1]:
            i += 1
        else:
            j += 1
    return common


def measure(intervals: Iterable[Interval]) -> int:
    """Return the length of the union of `intervals`."""
    return sum(ended - began for began, ended in merge(intervals))


def pack(intervals: Iterable[Interval]) -> list[int]:
    """Return for each interval the first row, counted from 0, that is free when it begins.

    Intervals are placed in the order in which they begin, the longer of two first, so an interval
    inside another one gets a row below it. An empty interval takes a place like any other.
    """
    numbered = list(enumerate(intervals))
    numbered.sort(key=lambda each: (each[1][0], -each[1][1]))
    rows = [0] * len(numbered)
    free_from: list[int] = []
    for number, (began, ended) in numbered:
        row = next((i for i, free in enumerate(free_from) if free <= began), len(free_from))
        if row == len(free_from):
            free_from.append(began)
        free_from[row] = max(began, ended)
        rows[number] = row
    return rows
