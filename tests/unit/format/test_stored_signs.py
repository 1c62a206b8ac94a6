"""Vital signs in a manifest: they come back, and those that cannot be true are refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from msgspec import Raw
from msgspec.structs import replace

import ckpt
from ckpt._format.leaf_table import LeafColumns, LeafEntry, LeafTable
from ckpt._format.manifest import ItemEntry
from ckpt._plan.leaf_entries import check_leaves
from ckpt._vitals.signs import LeafSigns
from ckpt._vitals.stored_signs import notes_of_step, of_step, signs_in
from ckpt.errors import CorruptCheckpointError
from ckpt.keep._questions import LeafNotes, notes_in
from ckpt.manifest import decode, encode, peek
from tests.support.signed_leaves import signed, signs_of_leaves

SIGNS = LeafSigns("0123456789abcdef", 2, 3.0, 2.5)
W = LeafEntry(
    name="w",
    kind="numpy",
    dtype="float32",
    shape=(2, 3),
    chunks=(2, 3),
    digests=["1" * 32],
    offsets=[0],
)
TIED = replace(W, name="tied", same_as=0)
UNKNOWN = replace(W, name="u")
WHOLE = replace(W, name="i", dtype="int32")
COUNT = LeafEntry(name="n", kind="int", value="3")
LEAVES = [W, TIED, UNKNOWN, WHOLE, COUNT]
OF_LEAVES = [SIGNS, SIGNS, None, replace(SIGNS, nonfinite=0), None]
TABLE = signed(LEAVES, OF_LEAVES)


def columns(table: LeafTable) -> dict[str, Any]:
    """The columns of the vital signs, as the file has them."""
    found: dict[str, Any] = msgspec.json.decode(table.extensions["vital_signs"])
    return found


def with_columns(table: LeafTable, found: dict[str, Any]) -> LeafTable:
    return table.replaced(extensions={"vital_signs": Raw(msgspec.json.encode(found))})


def written_and_read(table: LeafTable) -> LeafTable:
    data = msgspec.json.encode(table.columns())
    return LeafTable.read(msgspec.json.decode(data, type=LeafColumns))


def checked(table: LeafTable) -> None:
    check_leaves(ItemEntry("pytree", leaves=table, data_files=["d/" + "a" * 32]))


def test_the_signs_of_every_leaf_come_back() -> None:
    found = written_and_read(TABLE)
    assert signs_of_leaves(found) == OF_LEAVES
    assert found == TABLE != LeafTable.of(LEAVES)
    assert signs_in(found).nonfinite() == [0, 1]
    checked(found)


def test_columns_of_earlier_writers_are_read() -> None:
    # They were beside the others, and not below `extensions`.
    plain = msgspec.json.decode(msgspec.json.encode(LeafTable.of(LEAVES).columns()))
    old = msgspec.json.encode(plain | columns(signed(LEAVES, OF_LEAVES, {2: (1,)})))
    found = LeafTable.read(msgspec.json.decode(old, type=LeafColumns))
    assert signs_of_leaves(found) == OF_LEAVES
    assert signs_in(found).unequal == {2: (1,)}
    checked(found)
    assert written_and_read(found) == found


def test_where_none_are_known_there_are_no_columns() -> None:
    found = signed([UNKNOWN, COUNT], [None, None])
    assert found.extensions == {}
    assert "extensions" not in msgspec.json.decode(msgspec.json.encode(found.columns()))


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprints": b""},
        {"fingerprints": b"\0" * 41},
        {"norms": b""},
        {"norms": b"\0" * 32},
        {"absmax": b"\0" * 48},
        {"fingerprints": b"", "norms": b"", "absmax": b""},
        {"nonfinite": [(5, 1)]},
        {"nonfinite": [(0, 1), (0, 1)]},
        {"nonfinite": [(0, 0)]},
        {"nonfinite": [(0, -1)]},
        {"unequal": [(5, [0])]},
        {"unequal": [(0, [0]), (0, [1])]},
        {"unequal": [(0, [0]), (1, [])]},
        {"norms": 3},
    ],
    ids=str,
)
def test_columns_that_do_not_fit_each_other_are_refused(change: dict[str, Any]) -> None:
    table = with_columns(TABLE, columns(TABLE) | change)
    with pytest.raises(CorruptCheckpointError, match="vital signs cannot be read"):
        checked(table)


def test_something_else_than_columns_is_refused() -> None:
    for found in (3, None, "x", [1]):
        table = TABLE.replaced(extensions={"vital_signs": Raw(msgspec.json.encode(found))})
        with pytest.raises(CorruptCheckpointError, match="vital signs cannot be read"):
            checked(table)


@pytest.mark.parametrize(
    "signs",
    [
        replace(SIGNS, nonfinite=7),
        replace(SIGNS, norm=math.nan),
        replace(SIGNS, norm=math.inf),
        replace(SIGNS, norm=-0.5),
        replace(SIGNS, norm=2.4),
        replace(SIGNS, norm=7.0),
        replace(SIGNS, absmax=math.nan),
        replace(SIGNS, absmax=-1.0),
        replace(SIGNS, absmax=math.inf),
        # Of an unknown leaf nothing else may be said.
        replace(SIGNS, norm=-1.0),
    ],
    ids=str,
)
def test_signs_that_cannot_be_true_are_refused(signs: LeafSigns) -> None:
    table = signed([W, replace(W, name="x")], [SIGNS, signs])
    with pytest.raises(CorruptCheckpointError, match="vital signs cannot be true") as caught:
        checked(table)
    assert caught.value.leaf == "x"


@pytest.mark.parametrize("norm", [math.nan, math.inf, -0.5])
def test_signs_of_a_single_leaf_that_cannot_be_true_are_refused(norm: float) -> None:
    honest = signed([W, COUNT], [SIGNS, None])
    norms = np.array([norm, -1.0]).tobytes()
    table = with_columns(honest, columns(honest) | {"norms": norms})
    with pytest.raises(CorruptCheckpointError, match="vital signs cannot be true"):
        checked(table)
    # To everything else they are not known.
    assert signs_of_leaves(table) == [None, None]


def test_integers_and_values_in_the_manifest_are_finite_and_aliases_are_alike() -> None:
    odd = [(WHOLE, SIGNS), (COUNT, SIGNS), (TIED, replace(SIGNS, absmax=2.6))]
    for leaf, signs in odd:
        with pytest.raises(CorruptCheckpointError, match="vital signs cannot be true"):
            checked(signed([W, leaf], [SIGNS, signs]))


@pytest.fixture
def stored(tmp_path: Path) -> bytes:
    state = {"w": jnp.array([1.0, jnp.nan]), "b": np.array([np.inf]), "n": 3, "i": jnp.arange(3)}
    ckpt.sync.save(tmp_path / "a", state, extensions=[ckpt.extensions.VitalSigns()])
    return (tmp_path / "a" / "ckpt.json").read_bytes()


def test_the_head_counts_the_leaves_with_values_that_are_not_finite(stored: bytes) -> None:
    summary = peek(stored)
    assert summary is not None
    assert notes_in(summary) == LeafNotes(2, 0) == notes_in(decode(stored, where="a"))


def test_the_head_does_not_count_what_is_not_known(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "a", {"w": jnp.ones(2)})
    summary = peek((tmp_path / "a" / "ckpt.json").read_bytes())
    assert summary is not None
    assert summary.extensions == {}
    assert ckpt.extensions.VitalSigns.of(ckpt.sync.metadata(tmp_path / "a").tree["w"]) is None
    assert ckpt.sync.metadata(tmp_path / "a").info.nonfinite_leaves is None


def test_an_array_without_signs_does_not_hide_what_is_known_of_others(stored: bytes) -> None:
    manifest = decode(stored, where="a")
    item = manifest.items["default"]
    for names, known in ((["i"], 2), (["w"], 1), (["w", "b"], None), (["w", "b", "i"], None)):
        found = zip(item.leaves, signs_of_leaves(item.leaves), strict=True)
        signs = [None if leaf.name in names else each for leaf, each in found]
        items = {"default": replace(item, leaves=signed(item.leaves, signs))}
        notes = notes_of_step(replace(manifest, items=items))
        assert (notes.nonfinite_leaves, notes.unknown_leaves) == (known, len(names))
        assert of_step(items) == {"nonfinite_leaves": known, "unequal_leaves": 0}


def test_unequal_replicas_come_back() -> None:
    unequal = {0: (0, 3), 1: (0, 3)}
    found = written_and_read(signed([W, TIED, UNKNOWN], [SIGNS, SIGNS, None], unequal))
    assert signs_in(found).unequal == unequal
    # They are also told of leaves of which nothing else is known.
    found = written_and_read(signed([W, TIED, UNKNOWN], [None, None, None], unequal))
    assert (signs_in(found).unequal, columns(found).keys()) == (unequal, {"unequal"})
    assert "unequal" not in columns(TABLE)


def test_the_head_of_an_earlier_writer_is_read(stored: bytes) -> None:
    head, _, rest = stored.partition(b',"extensions":')
    after = rest.partition(b"}}")[2]
    for counts, known in (
        (b',"nonfinite_leaves":2', LeafNotes(2, 0)),
        (b',"nonfinite_leaves":2,"unequal_leaves":1', LeafNotes(2, 1)),
        (b"", LeafNotes(None, 0)),
    ):
        old = _with_head_of(stored, head + counts + after)
        assert b"extensions" not in old.partition(b',"head"')[0]
        summary = peek(old)
        assert summary is not None
        assert notes_in(summary) == known == notes_in(decode(old, where="a"))


@pytest.mark.parametrize(
    "noted", [3, None, "x", {"nonfinite_leaves": "many"}, {"unequal_leaves": []}]
)
def test_a_head_that_says_something_else_tells_nothing(stored: bytes, noted: Any) -> None:
    manifest = replace(decode(stored, where="a"), extensions={"vital_signs": noted})
    summary = peek(encode(manifest))
    assert summary is not None
    assert notes_in(summary) == LeafNotes()


@pytest.mark.parametrize("noted", [{"nonfinite_leaves": 1}, {"unequal_leaves": 1}])
def test_a_head_that_contradicts_the_leaves_is_reported(tmp_path: Path, noted: Any) -> None:
    ckpt.sync.save(tmp_path / "a", {"w": jnp.ones(3)}, extensions=[ckpt.extensions.VitalSigns()])
    assert ckpt.sync.verify(tmp_path / "a").ok
    file = tmp_path / "a" / "ckpt.json"
    manifest = decode(file.read_bytes(), where="a")
    file.write_bytes(encode(replace(manifest, extensions={"vital_signs": noted})))
    [problem] = ckpt.sync.verify(tmp_path / "a").problems
    assert (problem.file, problem.item, problem.leaf) == ("ckpt.json", None, None)
    assert "its head counts other" in problem.message


def _with_head_of(whole: bytes, head: bytes) -> bytes:
    """Return a manifest whose head says what that of another says, with checksums that fit."""
    from ckpt._format.manifest_head import digest

    key, tail = b',"checksum":"xxh3_128:', b'"}\n'
    front = head.partition(b',"head":"xxh3_128:')[0]
    rest = whole.partition(b',"head":"xxh3_128:')[2][32:].partition(key)[0]
    size = len(rest) - 1 + len(key) + 32 + len(tail)
    old = front.rpartition(b'"rest":')
    front = old[0] + old[1] + str(size).encode()
    body = front + b',"head":"xxh3_128:' + digest(front).encode() + rest
    return body + key + digest(body).encode() + tail
