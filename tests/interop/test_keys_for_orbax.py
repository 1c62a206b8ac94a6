"""Orbax finds leaves under the keys that its own checkpoints of the same tree have."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

ocp = pytest.importorskip("orbax.checkpoint")
from orbax.checkpoint.experimental import v1  # noqa: E402

import ckpt  # noqa: E402
import ckpt.sync  # noqa: E402
from ckpt._interop.orbax.sidecars import folder_of, orbax_names, same_name  # noqa: E402
from ckpt._tree.leaf_names import escape_key  # noqa: E402

# As of Haiku's modules, flat dicts of torch, and worse.
TREES: Mapping[str, Any] = {
    "slashes": {"mlp/~/linear_0": {"w": jnp.ones((3, 2))}},
    "dots": {"model.layers.0.weight": jnp.ones(3), "model": {"bias": jnp.zeros(2)}},
    "percents": {"a%b": jnp.ones(3), "100%": jnp.zeros(2), "%2F": jnp.ones(1)},
    "nothing": {"": jnp.ones(3), "a": {"": jnp.zeros(2)}},
    "one array": jnp.arange(4.0),
    "in a list": [jnp.ones(2), {"x/y": jnp.ones(1)}],
    "odd": {"a\\b": jnp.ones(2), "ü\n": jnp.ones(1), "'": jnp.zeros(1)},
}


def keys_of(item: Path) -> list[bytes]:
    spec = {"driver": "ocdbt", "base": f"file://{item}/"}
    return sorted(ts.KvStore.open(spec).result().list().result())


def tree_of(item: Path) -> Any:
    return json.loads((item / "_METADATA").read_text())["tree_metadata"]


def both(tree: Any, folder: Path) -> tuple[Path, Path]:
    """Save a tree with both libraries; return the directories of the items."""
    with v1.training.Checkpointer(folder / "theirs") as theirs:
        theirs.save(0, tree)
    with ckpt.sync.CheckpointManager(folder / "ours") as ours:
        ours.save(0, tree).result()
    return folder / "theirs" / "0" / "state", folder / "ours" / "0" / "default"


def same(one: Any, other: Any) -> bool:
    structures: list[Any] = [jax.tree.structure(one), jax.tree.structure(other)]
    return structures[0] == structures[1] and all(
        np.array_equal(*pair)
        for pair in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


@pytest.mark.parametrize("name", TREES)
def test_orbax_restores_trees_with_such_keys(name: str, tmp_path: Path) -> None:
    tree = TREES[name]
    theirs, ours = both(tree, tmp_path)
    assert tree_of(ours) == tree_of(theirs)
    assert keys_of(ours) == keys_of(theirs)
    target = jax.tree.map(jnp.zeros_like, tree)
    with ocp.CheckpointManager(tmp_path / "ours") as manager:
        assert same(manager.restore(0, args=ocp.args.StandardRestore(target)), tree)
        assert same(manager.restore(0, args=ocp.args.StandardRestore()), tree)
    assert same(v1.load(ours.parent, target), tree)
    assert same(v1.load(ours.parent), tree)
    assert same(ckpt.sync.load(ours.parent), tree)


KEYS = st.text("ab.%/ü 2EF~", max_size=4)
LEAVES = st.sampled_from([jnp.ones(2), np.zeros(3, np.int32), 7])
SUCH_TREES = st.dictionaries(
    KEYS,
    st.recursive(
        LEAVES,
        lambda below: st.one_of(
            st.dictionaries(KEYS, below, max_size=3), st.lists(below, max_size=2)
        ),
        max_leaves=5,
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(SUCH_TREES)
def test_the_view_says_what_orbax_says_of_a_tree(tree: Any) -> None:
    paths = jax.tree_util.tree_leaves_with_path(tree)
    assume(paths)
    texts = [".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in p) for p, _ in paths]
    assume(len({folder_of(text) for text in texts}) == len(texts))
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = both(tree, Path(folder))
        assert tree_of(ours) == tree_of(theirs)
        assert keys_of(ours) == keys_of(theirs)


def test_an_item_with_one_name_for_two_leaves_is_not_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Orbax itself would give one array for both, without a word."""
    odd = {"a": {"b": jnp.ones(3)}, "a.b": jnp.zeros(3)}
    items = {"odd": odd, "good": {"w": jnp.ones(2)}}
    with caplog.at_level(logging.WARNING, "ckpt"), ckpt.sync.CheckpointManager(tmp_path) as mgr:
        for step in range(2):
            mgr.save(step, items=items).result()
        assert same(mgr.restore(1), items)
    [told] = [each.getMessage() for each in caplog.records if "Orbax" in each.getMessage()]
    assert "'odd'" in told
    assert "'a.b'" in told
    assert "'a%2Eb'" in told
    with ocp.CheckpointManager(tmp_path) as manager:
        found = manager.restore(1, args=ocp.args.Composite(good=ocp.args.StandardRestore()))
        assert same(found["good"], items["good"])
        assert manager.item_metadata(1)["odd"] is None
    found = v1.load_checkpointables(tmp_path / "1")
    assert same(found["good"], items["good"])
    assert found["odd"]["handler"] == "pytree"


@given(st.lists(st.lists(KEYS, min_size=1, max_size=3), unique_by=tuple))
def test_names_are_the_same_where_the_texts_are(paths: list[list[str]]) -> None:
    names = [".".join(map(escape_key, path)) for path in paths]
    texts = [".".join(path) for path in paths]
    assert list(orbax_names(names)) == texts
    folders = {folder_of(text) for text in texts}
    assert (same_name(names) is None) == (len(folders) == len(texts))
