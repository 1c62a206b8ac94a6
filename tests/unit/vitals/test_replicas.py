"""Replicas: leaves whose copies differ are found, with the processes that differ from most."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckpt._vitals.signs import COPY, no_copies
from ckpt._vitals.stored_signs import differing_replicas

Prints = tuple[int, int]
# By process, leaf and chunk the fingerprint; few of each, so that many meet.
copies = st.dictionaries(
    st.tuples(st.integers(0, 4), st.integers(0, 2), st.integers(0, 2)),
    st.tuples(st.integers(0, 1), st.sampled_from([0, 1, 2**32 - 1])),
)


def plainly(held: dict[tuple[int, int, int], Prints]) -> dict[int, tuple[int, ...]]:
    found: dict[int, set[int]] = {}
    for leaf, chunk in {key[1:] for key in held}:
        mine = {process: held[process, leaf, chunk] for process, *at in held if at == [leaf, chunk]}
        counted = Counter(mine.values()).most_common()
        if len(counted) > 1:
            most = {print_ for print_, count in counted if count == counted[0][1]}
            for process, print_ in mine.items():
                if len(most) > 1 or print_ not in most:
                    found.setdefault(leaf, set()).add(process)
    return {leaf: tuple(sorted(each)) for leaf, each in sorted(found.items())}


@given(copies, st.randoms())
def test_those_that_differ_from_most_are_found(
    held: dict[tuple[int, int, int], Prints], random: object
) -> None:
    rows = [(*key, print_) for key, print_ in held.items()]
    random.shuffle(rows)  # type: ignore[attr-defined]
    assert differing_replicas(np.array(rows, COPY)) == plainly(held)


def test_a_process_whose_own_devices_differ_is_found() -> None:
    rows = [(0, 7, 1, (5, 5)), (1, 7, 1, (5, 5)), (1, 7, 1, (6, 5)), (2, 7, 1, (5, 5))]
    assert differing_replicas(np.array(rows, COPY)) == {7: (1,)}


def test_where_nothing_is_compared_nothing_differs() -> None:
    assert differing_replicas(no_copies()) == {}
