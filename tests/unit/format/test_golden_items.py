"""The golden checkpoint of items and leaves of every kind stays readable, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from make_golden_items import GOLDEN, Box, Layer, Loader, items, state

import ckpt
from ckpt.testing.compare import differences
from tests.support.manifests import leaf_rows


def loaded() -> dict[str, Any]:
    """The tree as it comes back: squeezed and rounded, its function brought by the target."""
    like = ckpt.sync.metadata(GOLDEN).items["model"]
    like["function"] = jax.nn.relu
    return ckpt.sync.load(GOLDEN, items={"model": like})["model"]


def test_the_tree_comes_back() -> None:
    found, expected = loaded(), state()
    assert isinstance(found["layer"], Layer)
    assert isinstance(found["box"], Box)
    rounded = expected.pop("rounded").astype(jnp.bfloat16)
    assert np.array_equal(found.pop("rounded"), rounded)
    # Plain containers of the tree are compared as jax orders them.
    assert differences(jax.tree.map(lambda leaf: leaf, expected), found) == []


def test_the_tree_comes_back_onto_a_target_of_today() -> None:
    like = state()
    like["rounded"] = jax.ShapeDtypeStruct((8,), jnp.float32)
    like["box"] = jnp.ones(4)
    found = ckpt.sync.load(GOLDEN, items={"model": like})["model"]
    assert found["box"].tolist() == [0, 0, 0, 0]
    assert found["rounded"].dtype == jnp.float32
    assert found["keys"]["rbg"].shape == (2, 3)


def test_what_stood_at_two_places_is_one_array() -> None:
    found = ckpt.sync.load(GOLDEN, items=["model"], adapt=ckpt.Adapt(select=["tied", "weak"]))[
        "model"
    ]
    assert found["tied"][0] is found["tied"][1]["again"]
    assert found["weak"].weak_type


def test_the_other_items_come_back() -> None:
    expected = items()
    names = ["config", "notes", "blob", "random"]
    found = ckpt.sync.load(GOLDEN, items=names)
    assert {name: found[name] for name in names[:3]} == {name: expected[name] for name in names[:3]}
    assert found["random"].random(4).tolist() == expected["random"].random(4).tolist()
    loader = Loader(0)
    ckpt.sync.load(GOLDEN, items={"loader": loader})
    assert loader.state == {"position": 11}


def test_what_is_new_in_it_is_named() -> None:
    manifest = json.loads((GOLDEN / "ckpt.json").read_bytes())
    assert manifest["requires"] == ["compression"]
    handlers = {name: item["handler"] for name, item in manifest["items"].items()}
    assert handlers == {
        "model": "pytree",
        "config": "json",
        "notes": "bytes",
        "blob": "bytes",
        "random": "random_state",
        "loader": "stateful",
    }
    kinds = {leaf["kind"] for leaf in leaf_rows(manifest["items"]["model"])}
    assert {"key", "callable", "numpy_str", "numpy_bytes"} <= kinds


def test_a_fresh_save_describes_the_tree_in_the_same_way(tmp_path: Path) -> None:
    """What is told of a tree is part of the format; where its bytes lie is not."""
    ckpt.sync.save(tmp_path / "x", items={"model": state()})
    told = []
    for path in (GOLDEN, tmp_path / "x"):
        item = json.loads((path / "ckpt.json").read_bytes())["items"]["model"]
        leaves = {leaf["name"]: leaf for leaf in leaf_rows(item)}
        for name in ("squeezed", "rounded"):
            # Stored by formats of their own.
            del leaves[name]
        for leaf in leaves.values():
            for field in ("offsets", "files", "lengths", "digests"):
                leaf.pop(field, None)
        told.append((item["nodes"], leaves))
    assert told[0] == told[1]
