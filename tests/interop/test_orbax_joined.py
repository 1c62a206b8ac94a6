"""Orbax reads a step that was joined of the parts of a job's processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp0
import pytest
from orbax.checkpoint import v1 as ocp

import ckpt
import ckpt.sync
from tests.support.joined_steps import join
from tests.support.real_jobs import run_processes
from tests.support.trees import abstract, structure


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step 1, joined of the parts of two processes."""
    root = tmp_path_factory.mktemp("job")
    run_processes(2, "save_both_ways.py", root, devices_per_process=2)
    join([root / str(index) / "1" for index in range(2)], root / "joined" / "1")
    return root / "joined"


@pytest.fixture(scope="module")
def arrays(root: Path) -> dict[str, jax.Array]:
    """The arrays of its model, on one device."""
    model = ckpt.sync.load(root / "1", items={"model": None})["model"]
    found = {name: each for name, each in model.items() if isinstance(each, jax.Array)}
    assert len(found) > 15
    return {name: jax.device_put(each, jax.devices()[0]) for name, each in found.items()}


def assert_same(found: Any, expected: dict[str, jax.Array]) -> None:
    assert structure(found) == structure(expected)
    for name, array in expected.items():
        own, read = array, found[name]
        if name == "key":
            own, read = jax.random.key_data(own), jax.random.key_data(read)
        assert np.array_equal(np.asarray(read), np.asarray(own)), name


def test_by_its_first_interface(root: Path, arrays: dict[str, jax.Array]) -> None:
    wanted = abstract(arrays)
    args = ocp0.args.PyTreeRestore(
        wanted,
        restore_args=ocp0.checkpoint_utils.construct_restore_args(wanted),
        partial_restore=True,
    )
    with ocp0.CheckpointManager(root) as manager:
        assert manager.all_steps() == [1]
        assert manager.metrics(1)["loss"] == 0.5
        found = manager.restore(1, args=ocp0.args.Composite(model=args))
    assert_same(found["model"], arrays)


def test_by_its_second_interface(root: Path, arrays: dict[str, jax.Array]) -> None:
    # It wants all of a tree.
    numpy = np.zeros(300_000, np.int16)
    found = ocp.load_checkpointables(root / "1", {"model": abstract(arrays) | {"numpy": numpy}})
    model = dict(found["model"])
    assert np.array_equal(model.pop("numpy"), np.arange(300_000, dtype=np.int16))
    assert_same(model, arrays)
    assert ocp.load_checkpointables(root / "1", {"config": None})["config"]["rate"] == 0.1
