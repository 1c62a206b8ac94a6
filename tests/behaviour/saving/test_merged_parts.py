"""The parts of a tree merge to the manifest entry that the whole tree would have."""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ckpt import errors
from ckpt._engine.plan_cache import PlanCache
from ckpt._format.manifest import ItemEntry
from ckpt._format.manifest_head import FILE_NAME
from ckpt._interop.orbax.database_index import KeyValue
from ckpt._interop.orbax.sidecars import database_keys
from ckpt._plan.item_reports import ChunkTable, ItemReport, PlannedTree
from ckpt._plan.leaf_entries import check_leaves
from ckpt._plan.merged_parts import TreeParts
from ckpt._plan.save_plan import WHOLE
from ckpt._tree.structure import describe
from ckpt.testing.strategies import keys, python_scalars
from tests.behaviour.saving.partial_saves import merged, plain
from tests.support.manifests import document_of
from tests.support.trees import assert_same

# Drawn more than once they are one object at several places.
SHARED = [np.arange(5), np.full((20_000, 3), 1, np.int32)]
LEAVES = st.one_of(
    python_scalars(),
    st.sampled_from(SHARED),
    st.builds(
        lambda rows, kind: np.full((rows, 3), 1, kind),
        st.integers(0, 40_000),
        st.sampled_from(["int8", "float32"]),
    ),
    st.lists(st.integers(0, 3), max_size=2),
)
DICTS = st.recursive(
    st.dictionaries(st.one_of(keys(), st.text("ab", max_size=1)), LEAVES, max_size=4),
    lambda children: st.builds(
        lambda make, pairs: make(pairs),
        st.sampled_from([dict, OrderedDict]),
        st.dictionaries(
            st.text("abc", min_size=1, max_size=2), st.one_of(children, LEAVES), max_size=4
        ),
    ),
    max_leaves=8,
)


def splits(draw: Callable[[Any], Any], tree: dict[Any, Any], count: int) -> list[dict[Any, Any]]:
    """Parts that make the tree together, in any order; a part may have empty dicts of it."""
    parts: list[dict[Any, Any]] = [type(tree)() for _ in range(count)]
    for key, value in tree.items():
        if type(value) in (dict, OrderedDict) and draw(st.booleans()):
            for part, below in zip(parts, splits(draw, value, count), strict=True):
                if below or draw(st.booleans()):
                    part[key] = below
            if not any(key in part for part in parts):
                parts[draw(st.integers(0, count - 1))][key] = type(value)()
        else:
            parts[draw(st.integers(0, count - 1))][key] = value
    return parts


def written_of(tree: Any, budget: int) -> tuple[PlannedTree, ItemReport]:
    """A tree that is saved, with a digest that tells whose chunk it is."""
    structure = describe(tree)
    save = PlanCache().plan("state", structure, budget, WHOLE, True, False).save
    ids = [id(leaf) for leaf in structure.leaves]
    digests = [[f"{ids[c.leaf]:016x}{c.number:016x}" for c in g.chunks] for g in save.batches]
    files = [f"d/{number:032x}" for number in range(len(save.batches))]
    report = ItemReport.of(save.batches, files, digests)
    return PlannedTree(structure.nodes, save.leaves, structure.leaves), report


def entry_of(tree: PlannedTree, reports: Sequence[ItemReport]) -> tuple[ItemEntry, list[KeyValue]]:
    stored = ChunkTable.merged(tree.leaves, reports)
    entry = tree.filled(ItemEntry(handler="pytree"), stored)
    return entry, list(database_keys(tree.leaves, stored))


@given(st.data(), DICTS, st.integers(1, 4), st.sampled_from([1 << 14, 1 << 20]))
def test_any_split_of_a_tree_merges_to_the_entry_of_the_whole(
    data: st.DataObject, tree: dict[Any, Any], count: int, budget: int
) -> None:
    try:
        describe(tree)
    except errors.UnsupportedLeafError:
        # Such as keys of no common order.
        return
    # Which objects are one is told within a part only.
    check_merging(list(map(copy.deepcopy, splits(data.draw, tree, count))), budget)


@st.composite
def parts_with_ties(draw: st.DrawFn) -> list[dict[Any, Any]]:
    """Parts whose keys come in any order, and of whose leaves many are one array."""
    parts: list[dict[Any, Any]] = [OrderedDict() for _ in range(draw(st.integers(2, 3)))]
    own = [copy.deepcopy(SHARED) for _ in parts]
    for path in draw(st.permutations([f"{outer}{inner}" for outer in "abc" for inner in "xy"])):
        number = draw(st.integers(0, len(parts) - 1))
        array = draw(st.sampled_from(own[number]))
        parts[number].setdefault(path[0], OrderedDict())[path[1]] = array
    return parts


@given(parts_with_ties(), st.sampled_from([1 << 14, 1 << 20]))
def test_what_is_one_array_in_a_part_is_one_in_the_whole(
    parts: list[dict[Any, Any]], budget: int
) -> None:
    check_merging(parts, budget)


def check_merging(parts: list[dict[Any, Any]], budget: int) -> None:
    tree, count = merged(parts), len(parts)
    planned, report = written_of(tree, budget)
    whole, theirs = entry_of(planned, [report])
    written = [written_of(part, budget) for part in parts]
    made = [entry_of(part, [report])[0] for part, report in written]
    work = TreeParts()
    for number, part in enumerate(parts):
        assert work.add(describe(part).nodes) == number
    union = work.merged()
    found, ours = entry_of(*union.planned(*zip(*written, strict=True)))
    check_leaves(found)

    def placeless(entry: ItemEntry) -> ItemEntry:
        blank: dict[str, Any] = {"offsets": [], "files": []}
        leaves = [replace(leaf, **blank) for leaf in entry.leaves]
        return replace(entry, leaves=leaves, data_files=[])

    assert placeless(found) == placeless(whole)
    # Every chunk lies where its part has put it.
    flat = [path for entry in made for path in entry.data_files]
    assert found.data_files == flat
    first_files = [sum(len(e.data_files) for e in made[:part]) for part in range(count)]
    for leaf, (source, number) in zip(found.leaves, union.sources, strict=True):
        own = made[source].leaves[number]
        assert leaf.offsets == own.offsets
        wanted = [first_files[source] + file for file in own.files or [0] * len(own.offsets)]
        assert list(leaf.files or [0] * len(leaf.offsets)) == wanted
    # And the index says the same of every key but for the places.
    assert {(e.key, e.inline, e.length) for e in ours} == {
        (e.key, e.inline, e.length) for e in theirs
    }
    assert len(ours) == len(theirs)
    starts = {
        (e.key.rsplit(b"/c", 1)[0], e.file, e.offset) for e in ours if e.inline is None and e.length
    }
    for leaf in found.leaves:
        files = leaf.files or [0] * len(leaf.offsets)
        for file, offset in zip(files, leaf.offsets, strict=True):
            assert (leaf.name.encode(), file, offset) in starts


def test_what_does_not_fit_adds_nothing() -> None:
    work = TreeParts()
    work.add(describe({"a": {"b": 1}}).nodes)
    before = work.merged()
    for wrong in ({"new": 1, "a": {"new": 2, "b": 3}}, [1], 5):
        with pytest.raises(errors.InvalidArgumentError):
            work.add(describe(wrong).nodes)
        assert work.merged() == before
    assert work.add(describe({"a": {"c": 1}}).nodes) == 1
    assert work.merged().names == ["a.b", "a.c"]


def test_a_key_is_marked_beside_one_of_the_same_text_that_comes_later(tmp_path: Path) -> None:
    with plain(tmp_path) as mgr:
        with mgr.partial(1) as part:
            part.save({"a": OrderedDict({1: np.arange(3)})})
            part.save({"a": OrderedDict({"1": np.arange(4)})})
        wanted = {"a": OrderedDict({1: np.arange(3), "1": np.arange(4)})}
        assert_same(mgr.restore(1), wanted)
        assert mgr.verify(1)
    names = document_of(tmp_path / "1")["items"]["default"]["leaves"]["names"]
    assert names == ["a.%k1", "a.1"]
    spec = {"driver": "zarr3", "kvstore": f"file://{tmp_path}/1/default/|ocdbt:a.%25k1/"}
    assert ts.open(spec, open=True).result().shape == (3,)


def manifest(path: Path) -> dict[str, Any]:
    return json.loads((path / FILE_NAME).read_bytes())
