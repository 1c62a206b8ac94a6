"""Checkpointers of Orbax find the tree of a checkpoint without names at the path of it itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ckpt
from tests.support.command import ckpt_command
from tests.support.trees import sharded, structure

FILES = {"_METADATA", "_sharding", "_strings.json", "manifest.ocdbt"}


def state() -> dict[str, Any]:
    return {
        "w": sharded(np.arange(48.0, dtype=np.float32).reshape(8, 6), "data", None),
        "half": jnp.arange(6, dtype=jnp.bfloat16),
        "layers": [{"b": np.arange(3)}, {"b": np.zeros((0, 2))}],
        "a.b": jnp.float32(2.5),
        "step": 3,
        "name": "run",
    }


def assert_read_by_orbax(path: Path, wanted: dict[str, Any]) -> None:
    for checkpointer in (ocp.StandardCheckpointer(), ocp.PyTreeCheckpointer()):
        found = checkpointer.restore(path)
        assert structure(found) == structure(wanted)
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
    by_name = ocp.Checkpointer(ocp.CompositeCheckpointHandler()).restore(path)
    assert list(by_name) == ["default"]


def own_files(path: Path) -> set[str]:
    return {each.name for each in path.iterdir()} & FILES


@pytest.mark.parametrize("durable", [True, False])
def test_a_save_without_names(tmp_path: Path, durable: bool) -> None:
    saved = ckpt.sync.save(tmp_path / "x", state(), durable=durable)
    if isinstance(saved, ckpt.Commit):
        saved.result()
    assert_read_by_orbax(tmp_path / "x", state())
    assert ckpt.sync.verify(tmp_path / "x").ok


@pytest.mark.anyio
async def test_an_asynchronous_save(tmp_path: Path) -> None:
    await ckpt.save(tmp_path / "x", state())
    assert_read_by_orbax(tmp_path / "x", state())


def test_onto_another_sharding(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", {"w": state()["w"]})
    target = jax.ShapeDtypeStruct(
        (8, 6), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[1])
    )
    found = ocp.StandardCheckpointer().restore(tmp_path / "x", {"w": target})["w"]
    assert found.sharding == target.sharding
    np.testing.assert_array_equal(found, state()["w"])


def test_copies_and_converted_checkpoints(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", state())
    assert ckpt_command("cp", tmp_path / "x", tmp_path / "copy").status == 0
    assert_read_by_orbax(tmp_path / "copy", state())
    part = ["--select", "w", "--select", "step"]
    assert ckpt_command("cp", tmp_path / "x", tmp_path / "part", *part).status == 0
    found = ckpt.sync.load(tmp_path / "part")
    assert found.keys() == {"w", "step"}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "theirs", {"w": state()["w"]})
    converted = "convert", tmp_path / "theirs", tmp_path / "ours", "--to", "ckpt"
    assert ckpt_command(*converted).status == 0
    assert_read_by_orbax(tmp_path / "ours", {"w": state()["w"]})


def test_nothing_is_there_that_does_not_fit(tmp_path: Path) -> None:
    """Neither for items with names, nor for what is left of such a checkpoint."""
    ckpt.sync.save(tmp_path / "named", items={"model": state()})
    assert not own_files(tmp_path / "named")
    ckpt.sync.save(tmp_path / "both", items={"default": state(), "other": {"n": np.arange(3)}})
    for name in ("default", "other"):
        copied = ckpt_command("cp", tmp_path / "both", tmp_path / name, "--select", name)
        assert copied.status == 0
        assert not own_files(tmp_path / name)
        assert ckpt.sync.verify(tmp_path / name).ok


def test_a_step_has_nothing_at_its_path(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, state())
    assert not own_files(tmp_path / "1")


def test_random_keys_come_as_numbers(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", {"key": jax.random.key(7)})
    found = ocp.StandardCheckpointer().restore(tmp_path / "x")["key"]
    np.testing.assert_array_equal(found, jax.random.key_data(jax.random.key(7)))
