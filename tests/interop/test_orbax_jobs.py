"""Orbax reads steps that a job of several processes has saved, alone and in a job of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp0
import pytest
from orbax.checkpoint import v1 as ocp

import ckpt.sync
from tests.support.real_jobs import run_processes
from tests.support.trees import abstract, structure

NAMES = ["columns", "half", "large rows", "replicas", "rows", "tiles"]


@pytest.fixture(scope="module", params=[2, 4])
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 2 and 3, of as many processes as the parameter says, with two devices each."""
    root = tmp_path_factory.mktemp("job") / "root"
    told = run_processes(request.param, "save_in_job.py", "roundtrip", root, devices_per_process=2)
    assert [child.value["steps"] for child in told] == [[2, 3]] * request.param
    return root


def on_one_device(leaf: Any) -> Any:
    return jax.device_put(leaf, jax.devices()[0]) if isinstance(leaf, jax.Array) else leaf


@pytest.mark.slow
def test_one_process_reads_them(root: Path) -> None:
    expected = jax.tree.map(on_one_device, ckpt.sync.load(root / "3"))
    # Without a target, Orbax refuses arrays of devices that are not there. It takes no texts in
    # one, so the older interface is asked for arrays alone.
    arrays = {name: leaf for name, leaf in expected.items() if isinstance(leaf, jax.Array)}
    wanted = abstract(arrays)
    args = ocp0.args.PyTreeRestore(
        wanted,
        restore_args=ocp0.checkpoint_utils.construct_restore_args(wanted),
        partial_restore=True,
    )
    handler = ocp0.PyTreeCheckpointHandler()
    with ocp0.CheckpointManager(root, item_handlers=handler) as manager:
        assert sorted(manager.all_steps()) == [2, 3]
        assert_same(manager.restore(3, args=args), arrays)
    with ocp0.Checkpointer(handler) as checkpointer:
        assert_same(checkpointer.restore(root / "3" / "default", args=args), arrays)
    assert_same(ocp.load(root / "3", abstract(expected)), expected)


def assert_same(found: Any, expected: Any) -> None:
    assert structure(found) == structure(expected)
    for (path, leaf), other in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        if isinstance(other, jax.Array) and jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
            leaf, other = jax.random.key_data(leaf), jax.random.key_data(other)
        assert np.array_equal(np.asarray(leaf), np.asarray(other)), path


@pytest.mark.slow
@pytest.mark.parametrize("root", [2], indirect=True)
def test_a_job_of_another_size_reads_its_parts(root: Path) -> None:
    for count in (2, 4):
        for told in run_processes(count, "restore_with_orbax.py", root, 3, devices_per_process=1):
            assert told.value == {"steps": [2, 3], "problems": [], "names": NAMES}
