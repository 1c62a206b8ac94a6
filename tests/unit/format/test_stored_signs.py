"""Vital signs in a manifest: they come back, and those that cannot be true are refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

import ckpt
from ckpt._format.leaf_table import LeafColumns, LeafEntry, LeafTable
from ckpt._format.manifest import ItemEntry, Manifest
from ckpt._plan.leaf_entries import check_leaves
from ckpt._vitals.signs import LeafSigns
from ckpt.errors import CorruptCheckpointError
from ckpt.manifest import decode, encode, peek

SIGNS = LeafSigns("0123456789abcdef", 2, 3.0, 2.5)
W = LeafEntry(
    name="w",
    kind="numpy",
    dtype="float32",
    shape=(2, 3),
    chunks=(2, 3),
    digests=["1" * 32],
    offsets=[0],
    vital_signs=SIGNS,
)
TIED = replace(W, name="tied", same_as=0)
UNKNOWN = replace(W, name="u", vital_signs=None)
WHOLE = replace(W, name="i", dtype="int32", vital_signs=replace(SIGNS, nonfinite=0))
COUNT = LeafEntry(name="n", kind="int", value="3")
LEAVES = [W, TIED, UNKNOWN, WHOLE, COUNT]


def columns(leaves: list[LeafEntry]) -> LeafColumns:
    return LeafTable.of(leaves).columns()


def checked(table: LeafTable) -> None:
    check_leaves(ItemEntry("pytree", leaves=table, data_files=["d/" + "a" * 32]))


def test_the_signs_of_every_leaf_come_back() -> None:
    data = msgspec.json.encode(columns(LEAVES))
    found = LeafTable.read(msgspec.json.decode(data, type=LeafColumns))
    assert [leaf.vital_signs for leaf in found] == [leaf.vital_signs for leaf in LEAVES]
    assert found == LeafTable.of(LEAVES)
    assert found.nonfinite() == [0, 1]
    checked(found)


def test_where_none_are_known_there_are_no_columns() -> None:
    found = columns([UNKNOWN, COUNT])
    assert (found.fingerprints, found.norms, found.absmax, found.nonfinite) == (b"", b"", b"", [])


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
    ],
    ids=str,
)
def test_columns_that_do_not_fit_each_other_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"vital signs|twice"):
        LeafTable.read(replace(columns(LEAVES), **change))


@pytest.mark.parametrize("change", [{"nonfinite": [(0, 0)]}, {"nonfinite": [(0, -1)]}], ids=str)
def test_a_count_that_no_array_can_have_is_refused(change: dict[str, Any]) -> None:
    data = msgspec.json.encode(replace(columns(LEAVES), **change))
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(data, type=LeafColumns)


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
    table = LeafTable.of([W, replace(W, name="x", vital_signs=signs)])
    with pytest.raises(CorruptCheckpointError, match="vital signs cannot be true") as caught:
        checked(table)
    assert caught.value.leaf == "x"


@pytest.mark.parametrize("norm", [math.nan, math.inf, -0.5])
def test_signs_of_a_single_leaf_that_cannot_be_true_are_refused(norm: float) -> None:
    lying = columns([W, COUNT])
    lying = replace(lying, norms=np.array([norm, -1.0]).tobytes())
    table = LeafTable.read(lying)
    with pytest.raises(CorruptCheckpointError, match="vital signs cannot be true"):
        checked(table)
    # To everything else they are not known.
    assert [leaf.vital_signs for leaf in table] == [None, None]


def test_integers_and_values_in_the_manifest_are_finite_and_aliases_are_alike() -> None:
    odd = [
        replace(WHOLE, vital_signs=SIGNS),
        replace(COUNT, vital_signs=SIGNS),
        replace(TIED, vital_signs=replace(SIGNS, absmax=2.6)),
    ]
    for leaf in odd:
        with pytest.raises(CorruptCheckpointError, match="vital signs cannot be true"):
            checked(LeafTable.of([W, leaf]))


@pytest.fixture
def stored(tmp_path: Path) -> bytes:
    state = {"w": jnp.array([1.0, jnp.nan]), "b": np.array([np.inf]), "n": 3, "i": jnp.arange(3)}
    ckpt.sync.save(tmp_path / "a", state, extensions=[ckpt.extensions.VitalSigns()])
    return (tmp_path / "a" / "ckpt.json").read_bytes()


def test_the_head_counts_the_leaves_with_values_that_are_not_finite(stored: bytes) -> None:
    summary = peek(stored)
    assert summary is not None
    assert summary.nonfinite_leaves == decode(stored, where="a").nonfinite_leaves == 2


def test_the_head_does_not_count_what_is_not_known(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "a", {"w": jnp.ones(2)})
    summary = peek((tmp_path / "a" / "ckpt.json").read_bytes())
    assert summary is not None
    assert summary.nonfinite_leaves is None
    assert ckpt.sync.metadata(tmp_path / "a").tree["w"].vital_signs is None
    assert ckpt.sync.metadata(tmp_path / "a").info.nonfinite_leaves is None


def test_an_array_without_signs_does_not_hide_what_is_known_of_others(stored: bytes) -> None:
    def without(data: bytes, *names: str) -> Manifest:
        manifest = decode(data, where="a")
        item = manifest.items["default"]
        leaves = [
            replace(leaf, vital_signs=None if leaf.name in names else leaf.vital_signs)
            for leaf in item.leaves
        ]
        return replace(manifest, items={"default": replace(item, leaves=LeafTable.of(leaves))})

    for names, known in ((["i"], 2), (["w"], 1), (["w", "b"], None), (["w", "b", "i"], None)):
        manifest = without(stored, *names)
        assert (manifest.nonfinite_leaves, manifest.unknown_leaves) == (known, len(names))
        summary = peek(encode(manifest))
        assert summary is not None
        assert summary.nonfinite_leaves == known
        decode(encode(manifest), where="a")
    # Earlier writers did not count then.
    data = encode(without(stored, "w"))
    head, key, rest = data.partition(b',"head":"xxh3_128:')
    old = _with_head_of(data, head.replace(b'"nonfinite_leaves":1,', b"") + key + rest)
    assert b"nonfinite_leaves" not in old
    assert decode(old, where="a").nonfinite_leaves == 1


def test_unequal_replicas_come_back() -> None:
    leaves = [replace(W, unequal_on=(0, 3)), replace(TIED, unequal_on=(0, 3)), UNKNOWN]
    data = msgspec.json.encode(columns(leaves))
    found = LeafTable.read(msgspec.json.decode(data, type=LeafColumns))
    assert [leaf.unequal_on for leaf in found] == [(0, 3), (0, 3), ()]
    assert found == LeafTable.of(leaves)
    assert b"unequal" not in msgspec.json.encode(columns(LEAVES))


@pytest.mark.parametrize(
    ("unequal", "message"),
    [
        ([(5, [0])], "a leaf that does not exist"),
        ([(0, [0]), (0, [1])], "twice"),
        ([(0, [0]), (1, [])], "on no process"),
    ],
    ids=str,
)
def test_unequal_replicas_that_contradict_the_leaves_are_refused(
    unequal: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LeafTable.read(replace(columns(LEAVES), unequal=unequal))


def test_a_head_that_counts_other_unequal_replicas_is_refused(stored: bytes) -> None:
    manifest = decode(stored, where="a")
    item = manifest.items["default"]
    leaves = [replace(leaf, unequal_on=(1,) if leaf.name == "w" else ()) for leaf in item.leaves]
    other = replace(manifest, items={"default": replace(item, leaves=LeafTable.of(leaves))})
    summary = peek(encode(other))
    assert summary is not None
    assert summary.unequal_leaves == decode(encode(other), where="a").unequal_leaves == 1
    for one, two in ((manifest, other), (other, manifest)):
        with pytest.raises(CorruptCheckpointError, match="its head counts"):
            decode(_with_head_of(encode(one), encode(two)), where="a")


def test_a_head_that_contradicts_the_leaves_is_refused(stored: bytes) -> None:
    manifest = decode(stored, where="a")
    item = manifest.items["default"]
    healthy = [
        replace(leaf, vital_signs=leaf.vital_signs and replace(leaf.vital_signs, nonfinite=0))
        for leaf in item.leaves
    ]
    other = replace(manifest, items={"default": replace(item, leaves=LeafTable.of(healthy))})
    mixed = _with_head_of(encode(manifest), encode(other))
    with pytest.raises(CorruptCheckpointError, match="not a valid manifest: its head counts"):
        decode(mixed, where="a")


def test_a_head_of_an_earlier_writer_counts_nothing(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "a", items={"notes": {"n": 1}})
    data = (tmp_path / "a" / "ckpt.json").read_bytes()
    head, key, rest = data.partition(b',"head":"xxh3_128:')
    assert b'"nonfinite_leaves":0,' in head
    old = _with_head_of(data, head.replace(b'"nonfinite_leaves":0,', b"") + key + rest)
    assert b"nonfinite_leaves" not in old
    assert decode(old, where="a").items.keys() == {"notes"}


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
