"""Steps with items that are no trees, read by Orbax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grain
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp0
import pytest
from google.protobuf import struct_pb2
from orbax.checkpoint import v1 as ocp

import ckpt
from tests.support.stateful_objects import Averages, Config, Counter

CONFIG = {"rate": 0.1, "layers": [1, None, "ü"]}


def iterator(seen: int) -> Any:
    made = iter(grain.MapDataset.range(100).shuffle(seed=1).to_iter_dataset())
    for _ in range(seen):
        next(made)
    return made


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("orbax") / "run"
    items = {
        "state": {"w": jnp.arange(6.0)},
        "config": CONFIG,
        "model": Config(),
        "log": "text",
        "blob": b"\0",
        "random": np.random.default_rng(0),
        "message": struct_pb2.Struct(),
        "counter": Counter(3),
        "averages": Averages(2.0),
        "data": iterator(7),
    }
    with ckpt.sync.CheckpointManager(root, handlers={"config": ckpt.handlers.JsonHandler()}) as mgr:
        mgr.save(3, items=items, metrics={"loss": 1.0}).result()
    return root


def test_v1_reads_json_as_json_trees_as_trees_and_words_about_the_rest(run: Path) -> None:
    found = ocp.load_checkpointables(run / "3")
    assert found["config"] == CONFIG
    assert found["model"] == Config().model_dump(mode="json")
    np.testing.assert_array_equal(found["state"]["w"], np.arange(6.0))
    np.testing.assert_array_equal(found["averages"]["means"], np.full((3, 2), 2.0))
    for item, handler in {
        "log": "bytes",
        "blob": "bytes",
        "random": "random_state",
        "message": "protobuf",
        "counter": "stateful",
        "data": "stateful",
    }.items():
        assert found[item]["handler"] == handler


def test_v1_loads_the_tree_of_a_step_that_has_other_items(run: Path) -> None:
    np.testing.assert_array_equal(ocp.load(run / "3")["w"], np.arange(6.0))
    assert set(ocp.checkpointables_metadata(run / "3").metadata) >= {"state", "config", "log"}


def test_v1_sets_a_grain_iterator_to_where_it_was(run: Path) -> None:
    data = iterator(0)
    ocp.load_checkpointables(run / "3", {"data": data})
    expected = iterator(7)
    assert [next(data) for _ in range(20)] == [next(expected) for _ in range(20)]


def test_v0_restores_every_item_without_arguments(run: Path) -> None:
    with ocp0.CheckpointManager(run) as manager:
        found = manager.restore(3)
    assert found["config"] == CONFIG
    assert found["log"]["handler"] == "bytes"
    np.testing.assert_array_equal(found["state"]["w"], np.arange(6.0))


def test_v0_restores_json_with_its_own_arguments(run: Path) -> None:
    args = ocp0.args.Composite(config=ocp0.args.JsonRestore(), state=ocp0.args.StandardRestore())
    with ocp0.CheckpointManager(run) as manager:
        found = manager.restore(3, args=args)
    assert found.config == CONFIG
    np.testing.assert_array_equal(found.state["w"], np.arange(6.0))
