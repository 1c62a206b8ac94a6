"""Leaves compared whole columns at a time, beside the same comparison leaf by leaf."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ckpt._format.leaf_table import UNCHECKED, LeafEntry, LeafTable
from ckpt._plan.compared_leaves import ComparedLeaves, Verdict, compare_leaves
from ckpt._vitals.signs import LeafSigns
from tests.support.signed_leaves import signed

DIGESTS = ("1" * 32, "2" * 32, "1" * 31 + "2", UNCHECKED, "")
SIGNS = (
    None,
    LeafSigns("0" * 15 + "1", 0, 1.0, 1.0),
    LeafSigns("1" + "0" * 15, 0, 1.0, 1.0),
    LeafSigns("1" + "0" * 14 + "1", 0, 1.0, 1.0),
    LeafSigns("0" * 15 + "1", 2, 1.0, 1.0),
)
Leaf = tuple[LeafEntry, LeafSigns | None]
# Shape, chunks, and how many chunks there are.
LAYOUTS: list[tuple[tuple[int, ...], tuple[int, ...], int]] = [
    ((4,), (4,), 1),
    ((4,), (2,), 2),
    ((4,), (1,), 4),
    ((2, 2), (2, 2), 1),
    ((0,), (), 0),
]


@st.composite
def entries(draw: st.DrawFn, name: str) -> LeafEntry:
    kind = draw(st.sampled_from(["jax", "jax", "jax", "numpy", "key", "int", "str", "callable"]))
    if kind == "callable":
        return LeafEntry(name, kind)
    if kind in ("int", "str"):
        return LeafEntry(name, kind, value=draw(st.sampled_from(["1", "2"])))
    shape, chunks, count = draw(st.sampled_from(LAYOUTS))
    digests = draw(st.lists(st.sampled_from(DIGESTS), min_size=count, max_size=count))
    return LeafEntry(
        name,
        kind,
        draw(st.sampled_from(["uint32", "float32"])),
        shape,
        chunks,
        digests,
        list(range(count)),
        impl=draw(st.sampled_from(["rbg", "threefry2x32"])) if kind == "key" else None,
    )


@st.composite
def trees(draw: st.DrawFn) -> list[Leaf]:
    names = draw(st.lists(st.sampled_from("abcdef"), unique=True))
    found: list[Leaf] = []
    for name in names:
        arrays = [n for n, (each, _) in enumerate(found) if each.same_as is None and each.digests]
        if draw(st.booleans()) and arrays:
            source = draw(st.sampled_from(arrays))
            leaf, signs = found[source]
            found.append((replace(leaf, name=name, same_as=source), signs))
        else:
            leaf = draw(entries(name))
            found.append((leaf, draw(st.sampled_from(SIGNS)) if leaf.dtype else None))
    return found


def table_of(leaves: Sequence[Leaf]) -> LeafTable:
    return signed([leaf for leaf, _ in leaves], [signs for _, signs in leaves])


def verdict_of(before: Leaf, after: Leaf) -> tuple[Verdict, int]:
    """What is known of a leaf, and how many chunks have changed; -1 if that is not known."""
    one, other = before[0], after[0]
    if (one.kind, one.dtype, one.shape, one.impl) != (
        other.kind,
        other.dtype,
        other.shape,
        other.impl,
    ):
        return Verdict.OTHER_TYPE, -1
    if one.dtype is None:
        return (Verdict.SAME if one.value == other.value else Verdict.OTHER_VALUE), -1
    if 0 in one.shape:
        return Verdict.SAME, -1
    are_known = not {"", UNCHECKED} & {*one.digests, *other.digests}
    if one.chunks == other.chunks and are_known:
        changed = sum(a != b for a, b in zip(one.digests, other.digests, strict=True))
        return (Verdict.CHANGED if changed else Verdict.SAME), changed
    signs = before[1], after[1]
    if signs[0] is None or signs[1] is None:
        return Verdict.UNKNOWN, -1
    is_same = (signs[0].fingerprint, signs[0].nonfinite) == (
        signs[1].fingerprint,
        signs[1].nonfinite,
    )
    return (Verdict.SAME_BY_FINGERPRINT if is_same else Verdict.CHANGED), -1


def compared(before: Sequence[Leaf], after: Sequence[Leaf]) -> ComparedLeaves:
    tables = table_of(before), table_of(after)
    return compare_leaves(tables[0], tables[0].names, tables[1], tables[1].names)


@given(trees(), trees(), st.booleans())
def test_columns_tell_what_single_leaves_tell(
    before: list[Leaf], after: list[Leaf], is_reordered: bool
) -> None:
    if is_reordered:
        # The same leaves at other numbers, with the chunks of others between them.
        after = [(replace(each, same_as=None), signs) for each, signs in reversed(before)]
    found = compared(before, after)
    first, second = ({each[0].name: each for each in leaves} for leaves in (before, after))
    assert [before[n][0].name for n in found.removed] == [n for n in first if n not in second]
    assert [after[n][0].name for n in found.added] == [n for n in second if n not in first]
    names = [name for name in first if name in second]
    pairs = [(before[a][0].name, after[b][0].name) for a, b in found.pairs.tolist()]
    assert pairs == [(name, name) for name in names]
    told = list(zip(found.verdicts.tolist(), found.chunks_changed.tolist(), strict=True))
    assert told == [verdict_of(first[name], second[name]) for name in names]
    kinds = {Verdict(verdict) for verdict, _ in told}
    if found.removed or found.added or kinds & {2, 4, 5}:
        assert found.is_same is False
    else:
        assert found.is_same is (None if Verdict.UNKNOWN in kinds else True)


@pytest.mark.parametrize("one", SIGNS)
@pytest.mark.parametrize("other", SIGNS)
def test_fingerprints_tell_of_other_chunks_and_digests_of_the_same(
    one: LeafSigns | None, other: LeafSigns | None
) -> None:
    first = LeafEntry("w", "jax", "float32", (4,), (4,), ["1" * 32], [0])
    second = replace(first, chunks=(2,), digests=["1" * 32] * 2, offsets=[0, 8])
    [verdict] = compared([(first, one)], [(second, other)]).verdicts.tolist()
    if one is None or other is None:
        assert verdict == Verdict.UNKNOWN
    else:
        assert verdict == (Verdict.SAME_BY_FINGERPRINT if one == other else Verdict.CHANGED)
    [verdict] = compared([(first, one)], [(first, other)]).verdicts.tolist()
    assert verdict == Verdict.SAME


@given(trees())
def test_an_item_is_the_same_as_itself_unless_something_is_not_known(
    leaves: list[Leaf],
) -> None:
    found = compared(leaves, leaves)
    assert found.is_same is not False
    assert not found.removed
    assert not found.added


@pytest.mark.parametrize("norm", [math.nan, math.inf, -2.0])
def test_fingerprints_beside_numbers_that_no_array_has_tell_nothing(norm: float) -> None:
    signs = LeafSigns("0" * 16, 0, 1.0, 1.0)
    leaf = LeafEntry("w", "jax", "float32", (4,), (4,), ["1" * 32], [0])
    first = leaf, signs
    other = replace(leaf, chunks=(2,), digests=["1" * 32] * 2, offsets=[0, 8])
    second = other, replace(signs, norm=norm)
    for pair in ((first, second), (second, first)):
        [verdict] = compared([pair[0]], [pair[1]]).verdicts.tolist()
        assert verdict == Verdict.UNKNOWN
