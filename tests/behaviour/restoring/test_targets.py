"""Targets: abstract ones, trees of shardings, one branch, and what is not a target."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckpt
import ckpt.sync
from ckpt import Adapt, errors
from ckpt._tree.leaf_specs import spread

MESH = Mesh(np.array(jax.devices()), ("data",))
ROWS = NamedSharding(MESH, PartitionSpec("data"))
WHOLE = NamedSharding(MESH, PartitionSpec())


def init() -> dict[str, Any]:
    return {
        "params": {"w": jnp.arange(32.0).reshape(8, 4), "b": jnp.ones(8)},
        "key": jax.random.key(0),
        "step": jnp.int32(7),
    }


def same_structure(one: Any, other: Any) -> bool:
    structures: list[Any] = [jax.tree.structure(one), jax.tree.structure(other)]
    return bool(structures[0] == structures[1])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ckpt.sync.save(tmp_path / "a", init())
    return tmp_path / "a"


# --- Abstract targets -----------------------------------------------------------------------------


@pytest.mark.parametrize("tree", [init, init()])
def test_an_abstract_target_has_no_arrays(tree: Any, path: Path) -> None:
    target = ckpt.abstract(tree)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(target))
    found = ckpt.sync.load(path, like=target)
    assert same_structure(found, init())
    assert (found["params"]["w"] == init()["params"]["w"]).all()
    assert found["key"].dtype == init()["key"].dtype


def test_a_jitted_function_has_its_shardings() -> None:
    places = {"params": {"w": ROWS, "b": WHOLE}, "key": None, "step": None}
    target = ckpt.abstract(jax.jit(init, out_shardings=places))
    assert same_structure(target, init())
    assert target["params"]["w"].sharding == ROWS
    assert target["params"]["b"].sharding == WHOLE
    assert target["step"].sharding is None
    assert target["key"].dtype == init()["key"].dtype


def test_shardings_of_arrays_stay_unless_others_are_given(path: Path) -> None:
    sharded = init()
    sharded["params"] = jax.device_put(sharded["params"], ROWS)
    for leaf in jax.tree.leaves(sharded):
        leaf.delete()
    found = ckpt.sync.load(path, like=ckpt.abstract(sharded))
    assert found["params"]["w"].sharding == ROWS
    assert not found["step"].committed
    target = ckpt.abstract(sharded, {"params": WHOLE, "key": None, "step": WHOLE})
    found = ckpt.sync.load(path, like=target)
    assert found["params"]["b"].sharding == found["step"].sharding == WHOLE
    assert found["key"].sharding != WHOLE


def test_what_is_not_an_array_stays() -> None:
    tree = {"n": 3, "f": jnp.tanh, "h": np.ones(2), "s": ...}
    found = ckpt.abstract(tree)
    assert found["h"] is tree["h"]
    assert found == tree
    assert isinstance(ckpt.abstract(tree, WHOLE)["h"], jax.ShapeDtypeStruct)


@pytest.mark.parametrize(
    ("shardings", "message"),
    [
        (3, "expected a sharding"),
        ({"params": WHOLE}, "does not fit"),
        ({"params": "rows", "key": None, "step": None}, "not str: 'rows'"),
        ({"params": {"w": WHOLE, "c": WHOLE}, "key": None, "step": None}, "does not fit"),
    ],
)
def test_shardings_that_do_not_fit(shardings: Any, message: str, path: Path) -> None:
    for make in (ckpt.abstract, lambda _, tree: ckpt.sync.metadata(path).target(tree)):
        with pytest.raises(errors.InvalidArgumentError, match=message):
            make(init, shardings)


def test_a_function_that_cannot_be_traced() -> None:
    def make() -> dict[str, float]:
        return {"w": float(jnp.ones(1)[0])}

    with pytest.raises(errors.InvalidArgumentError, match=r"make cannot be traced.*Pass the state"):
        ckpt.abstract(make)


# --- Trees of shardings ---------------------------------------------------------------------------


def test_metadata_takes_a_tree_or_a_function(path: Path) -> None:
    metadata = ckpt.sync.metadata(path)
    by_tree = metadata.target({"params": {"w": ROWS, "b": None}, "key": None, "step": None})
    by_function = metadata.target(lambda leaf: ROWS if leaf.name == "params.w" else None)
    for target in (by_tree, by_function):
        found = ckpt.sync.load(path, like=target)
        assert found["params"]["w"].sharding == ROWS
        assert not found["params"]["b"].committed


TREES = st.recursive(
    st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
)


@given(TREES, st.data())
def test_every_leaf_gets_the_sharding_of_its_branch(tree: Any, data: st.DataObject) -> None:
    def cut(node: Any) -> tuple[Any, list[Any]]:
        """Return a prefix of a tree, and the sharding that each of its leaves should get."""
        if data.draw(st.booleans()) or not isinstance(node, list | dict):
            place = data.draw(st.sampled_from([None, ROWS, WHOLE]))
            return place, [place] * len(jax.tree.leaves(node))
        parts = node if isinstance(node, list) else [node[key] for key in sorted(node)]
        cuts = [cut(each) for each in parts]
        places = [place for _, found in cuts for place in found]
        prefixes = [prefix for prefix, _ in cuts]
        if isinstance(node, list):
            return prefixes, places
        return dict(zip(sorted(node), prefixes, strict=True)), places

    prefix, wanted = cut(tree)
    assert spread(prefix, tree) == wanted


# --- One branch -----------------------------------------------------------------------------------


def test_one_branch_is_loaded_as_if_it_were_the_tree(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ckpt")
    params = init()["params"]
    found = ckpt.sync.load(path, like=params, at="params")
    assert same_structure(found, params)
    assert (found["w"] == params["w"]).all()
    # Bytes that are reported are bytes that were read.
    assert f"{32 * 4 + 8 * 4} B in" in caplog.text
    assert ckpt.sync.load(path, at="params").keys() == params.keys()
    assert (ckpt.sync.load(path, at="params.w") == params["w"]).all()
    cast = ckpt.sync.load(path, like={"w": jnp.zeros((8, 4)), "b": ...}, at="params")
    assert cast["b"] is ...


def test_a_branch_of_an_item(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, items={"model": init(), "n": {"a": 1}}, durable=True)
        found = mgr.restore(1, items={"model": init()["params"]}, at="params")
        assert found["model"].keys() == {"w", "b"}
        with pytest.raises(errors.InvalidArgumentError, match="'model:params'"):
            mgr.restore(1, at="params")


def test_a_branch_may_name_the_item_that_is_loaded(tmp_path: Path) -> None:
    inner = {"params": np.ones(3), "model": {"params": np.zeros(2)}}
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, items={"model": inner, "n": {"a": 1}}, durable=True)
        for items in (["model"], {"model": np.zeros(3)}):
            found = mgr.restore(1, items=items, at="model:params")
            assert found["model"].tolist() == [1, 1, 1]
        # The item is named already, so this is a branch of it.
        found = ckpt.sync.load(tmp_path / "1", items=["model"], at="model")
        assert found["model"].keys() == {"params"}
        for several in (["n"], ["model", "n"]):
            with pytest.raises(errors.CheckpointError, match="model:params"):
                mgr.restore(1, items=several, at="model:params")


@pytest.mark.parametrize(
    ("at", "adapt", "message"),
    [
        ("", None, "the leaf path of one branch"),
        (3, None, "the leaf path of one branch"),
        ("params.*", None, "the leaf path of one branch"),
        ("parms", None, r"is it 'params'\?"),
        ("params", Adapt(select="key"), "leave out select and rename"),
        ("params", Adapt(rename={"key": "k"}), "leave out select and rename"),
    ],
)
def test_branches_that_are_wrong(at: Any, adapt: Adapt | None, message: str, path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        ckpt.sync.load(path, at=at, adapt=adapt)


# --- What is not a target -------------------------------------------------------------------------


def traced(path: Path) -> Any:
    return jax.jit(lambda state: ckpt.sync.load(path, like=state))(init())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda path: ckpt.sync.load(path, like=init), r"like= is the function .*jax\.eval_shape"),
        (traced, "call restore.. outside jit"),
        (
            lambda path: ckpt.sync.load(path, like=init() | {"step": jnp.int32}),
            r"step: stored int32\[\], wanted the dtype int32, which has no shape: give jax\.Shape",
        ),
        (
            lambda path: ckpt.sync.load(path, like=init() | {"step": WHOLE}),
            "wanted a NamedSharding, which has no shape: give jax.ShapeDtypeStruct",
        ),
        (
            lambda path: ckpt.sync.load(path, adapt=Adapt(cast="complex64")),
            "casts arrays of its own kind, and there are none: stored are float32, int32",
        ),
    ],
)
def test_targets_that_are_none(call: Callable[[Path], Any], message: str, path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        call(path)


def test_trees_that_jax_cannot_flatten(path: Path) -> None:
    tree = {1: jnp.ones(3), "w": jnp.ones(3)}
    with pytest.raises(errors.UnsupportedLeafError, match="cannot be sorted"):
        ckpt.sync.load(path, like=tree)
    with pytest.raises(errors.InvalidArgumentError, match="cannot flatten the tree"):
        ckpt.abstract(tree)


@pytest.mark.parametrize("adapt", [Adapt(missing="keep"), Adapt(select="params", missing="keep")])
def test_a_donated_array_cannot_be_kept(adapt: Adapt, path: Path) -> None:
    gone = jnp.ones(3)
    gone.delete()
    with pytest.raises(errors.TargetMismatchError, match=r"new: .*which was donated or deleted"):
        ckpt.sync.load(path, like=init() | {"new": gone}, adapt=adapt)


def test_one_dtype_casts_what_is_of_its_kind(path: Path) -> None:
    found = ckpt.sync.load(path, adapt=Adapt(cast="bfloat16"))
    assert found["params"]["w"].dtype == jnp.bfloat16
    assert found["step"].dtype == jnp.int32
