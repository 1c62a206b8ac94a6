"""Leaves in columns: every leaf comes back, and columns that do not fit each other are refused."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ckpt._format.leaf_table import LeafColumns, LeafEntry, LeafForm, LeafTable

W = LeafEntry(
    name="w",
    kind="jax",
    dtype="float32",
    shape=(4, 3),
    chunks=(2, 3),
    digests=["0" * 31 + "1", "f" * 32],
    offsets=[0, 4096],
    files=[0, 1],
    sharding=0,
)
TIED = replace(W, name="tied", same_as=0)
PACKED = LeafEntry(
    name="b",
    kind="numpy",
    dtype="int8",
    shape=(7,),
    chunks=(7,),
    digests=["a" * 32],
    offsets=[24],
    packed=True,
)
ENCODED = replace(
    W, name="z", codec="zstd", lengths=[10, 11], files=[2, 2], digests=["b" * 32, "c" * 32]
)
COUNT = LeafEntry(name="n", kind="int", value="3")
EMPTY = LeafEntry(name="e", kind="numpy", dtype="int8", shape=(0,), chunks=(1,))
LEAVES = [W, TIED, PACKED, ENCODED, COUNT, EMPTY]


def columns(leaves: list[LeafEntry]) -> LeafColumns:
    return LeafTable.of(leaves).columns()


def written_and_read(table: LeafTable) -> LeafTable:
    data = msgspec.json.encode(table.columns())
    return LeafTable.read(msgspec.json.decode(data, type=LeafColumns))


def test_every_leaf_comes_back() -> None:
    found = written_and_read(LeafTable.of(LEAVES))
    assert len(found) == len(LEAVES)
    for leaf, expected in zip(found, LEAVES, strict=True):
        # Where some chunks are in other files than the first, all say so.
        count = len(expected.digests)
        full = replace(expected, files=list(expected.files) or [0] * count)
        for name in LeafEntry.__struct_fields__:
            assert list_or_self(getattr(leaf, name)) == list_or_self(getattr(full, name)), name
    assert found == LeafTable.of(found)
    assert found[1:3] == [found[1], found[2]]
    assert found[-1].name == "e"


def list_or_self(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value


def test_columns_are_left_out_where_all_is_in_the_first_file_and_plain() -> None:
    found = columns([PACKED, replace(PACKED, name="c")])
    assert (found.form, found.files, found.lengths) == (b"", b"", b"")
    assert len(found.forms) == 1
    assert len(found.offsets) == 16


def test_a_chunk_on_another_disk_has_no_digest() -> None:
    leaf = replace(W, digests=["", "f" * 32], offsets=[0, 4096], files=())
    (found,) = written_and_read(LeafTable.of([leaf]))
    assert list(found.digests) == ["", "f" * 32]
    assert list(found.offsets) == [0, 4096]


def test_thousands_of_leaves_take_little_memory_until_they_are_looked_at() -> None:
    count = 20_000
    data = msgspec.json.encode(columns([replace(PACKED, name=f"w{n}") for n in range(count)]))
    tracemalloc.start()
    table = LeafTable.read(msgspec.json.decode(data, type=LeafColumns))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(table) == count
    # Names of 53 bytes each, and 40 bytes of columns.
    assert held < 160 * count


@pytest.mark.parametrize(
    "change",
    [
        {"names": ["w"]},
        {"names": []},
        {"form": b"\0" * 8},
        {"form": b"\0" * 23},
        {"form": (9).to_bytes(4, "little") * 6},
        {"forms": []},
        {"digests": b"\0" * 16},
        {"digests": b""},
        {"digests": b"\0" * 81},
        {"offsets": b""},
        {"offsets": b"\0" * 41},
        {"offsets": b"\0" * 48},
        {"files": b"\0" * 4},
        {"lengths": b"\0" * 8},
        {"same_as": []},
        {"same_as": [(1, 1)]},
        {"same_as": [(0, 1)]},
        {"same_as": [(1, 0), (1, 0)]},
        {"same_as": [(1, 0), (9, 0)]},
        {"same_as": [(1, 9)]},
        {"same_as": [(1, 0), (3, 1)]},
        {"same_as": [(1, 0), (4, 0)]},
        {"values": [(6, "3")]},
        {"values": [(4, "3"), (4, "3")]},
    ],
    ids=str,
)
def test_columns_that_do_not_fit_each_other_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        LeafTable.read(replace(columns(LEAVES), **change))


@pytest.mark.parametrize(
    "leaf",
    [
        replace(W, offsets=[0]),
        replace(W, files=[0, 0, 0]),
        replace(W, lengths=[1]),
        replace(W, digests=["0" * 31, "f" * 33]),
        replace(TIED, same_as=2),
    ],
)
def test_a_leaf_that_contradicts_itself_is_refused(leaf: LeafEntry) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        LeafTable.of([W, replace(leaf, name="x")])


NUMBERS = st.integers(0, 4)


@given(
    names=st.lists(st.text(max_size=3), max_size=4),
    forms=st.lists(
        st.builds(LeafForm, kind=st.just("jax"), count=st.sampled_from([0, 1, 2, 2**31])),
        max_size=3,
    ),
    form=st.lists(NUMBERS, max_size=4).map(lambda each: np.array(each, "<u4").tobytes()),
    chunks=NUMBERS,
    files=st.binary(max_size=16),
    lengths=st.binary(max_size=16),
    same_as=st.lists(st.tuples(NUMBERS, NUMBERS), max_size=2),
    values=st.lists(st.tuples(NUMBERS, st.just("1")), max_size=2),
)
def test_any_columns_are_a_table_or_refused(chunks: int, **found: Any) -> None:
    made = LeafColumns(digests=bytes(16 * chunks), offsets=bytes(8 * chunks), **found)
    try:
        table = LeafTable.read(made)
    except ValueError:
        return
    leaves = list(table)
    assert [leaf.name for leaf in leaves] == made.names
    assert sum(len(leaf.digests) for leaf in leaves if leaf.same_as is None) == chunks
    assert all(len(leaf.digests) == len(leaf.offsets) == leaf.form.count for leaf in leaves)
    assert written_and_read(table) == table
