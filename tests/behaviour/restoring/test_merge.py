"""Merges: the weighted mean of checkpoints, loaded onto any mesh."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from safetensors.numpy import save_file

import ckpt
import ckpt.sync
from ckpt import errors
from tests.support.real_jobs import run_processes
from tests.support.trees import P, mesh, sharded

WEIGHTS = {1: 0.25, 2: 0.25, 3: 0.5}


def state(scale: int) -> dict[str, Any]:
    rows = np.arange(64 * 48, dtype=np.float32).reshape(64, 48) * scale
    return {
        "params": {
            "w": sharded(rows, "data", "model"),
            "half": jnp.full(5, scale / 3, jnp.bfloat16),
            "none": jnp.zeros((0, 2)),
            "host": np.full(3, scale, np.float64),
        },
        "complex": jnp.full(2, scale + 1j, jnp.complex64),
        "scalar": np.float32(scale),
        "key": jax.random.key(scale),
        "count": jnp.int32(scale),
        "n": scale,
        "name": f"step {scale}",
    }


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, float]:
    root = tmp_path_factory.mktemp("run")
    with ckpt.sync.CheckpointManager(root) as mgr:
        for step in WEIGHTS:
            mgr.save(step, state(step))
    return {root / str(step): weight for step, weight in WEIGHTS.items()}


def mean(*path: str) -> Any:
    total: Any = 0
    for step, weight in WEIGHTS.items():
        leaf: Any = state(step)
        for key in path:
            leaf = leaf[key]
        value = np.asarray(leaf)
        wide = np.float32 if value.dtype == ml_dtypes.bfloat16 else value.dtype
        total = total + value.astype(wide) * np.asarray(weight, wide)
    return total


def test_real_numbers_are_averaged_and_the_rest_is_of_the_heaviest(
    steps: dict[Path, float],
) -> None:
    found = ckpt.sync.merge(steps)
    for path in (("params", "w"), ("params", "host"), ("complex",), ("scalar",)):
        leaf: Any = found
        for key in path:
            leaf = leaf[key]
        np.testing.assert_allclose(np.asarray(leaf), mean(*path), rtol=1e-6)
    assert found["params"]["w"].sharding == state(1)["params"]["w"].sharding
    assert isinstance(found["params"]["host"], np.ndarray)
    assert found["params"]["host"].dtype == np.float64
    assert isinstance(found["scalar"], np.float32)
    assert found["params"]["none"].shape == (0, 2)
    expected = mean("params", "half").astype(ml_dtypes.bfloat16)
    assert np.asarray(found["params"]["half"]).tobytes() == expected.tobytes()
    assert (int(found["count"]), found["n"], found["name"]) == (3, 3, "step 3")
    data = jax.random.key_data(found["key"])
    assert (data == jax.random.key_data(jax.random.key(3))).all()


def test_onto_another_mesh_in_another_dtype(steps: dict[Path, float]) -> None:
    other = NamedSharding(mesh(4, 2), P(None, "data"))
    target = {"weights": jax.ShapeDtypeStruct((64, 48), jnp.bfloat16, sharding=other)}
    adapt = ckpt.Adapt(rename={"params.w": "weights"}, extra="ignore")
    found: Any = ckpt.sync.merge(steps, target, adapt=adapt)
    assert found["weights"].sharding == other
    expected = mean("params", "w").astype(ml_dtypes.bfloat16)
    assert np.asarray(found["weights"]).tobytes() == expected.tobytes()


def test_a_branch_and_a_surgery(steps: dict[Path, float]) -> None:
    found = ckpt.sync.merge(steps, at="params.w")
    np.testing.assert_allclose(np.asarray(found), mean("params", "w"), rtol=1e-6)
    cut = ckpt.Adapt(select="params.w", transforms=[ckpt.surgery.transpose("params.w")])
    turned = ckpt.sync.merge(steps, adapt=cut)["params"]["w"]
    np.testing.assert_allclose(np.asarray(turned), mean("params", "w").T, rtol=1e-6)


def test_half_precision_is_added_up_in_single_precision(tmp_path: Path) -> None:
    values = [1.0, 1.0078125, 1.0, 1.0078125, 1.0078125, 1.0, 1.0078125, 1.0]
    for number, value in enumerate(values):
        ckpt.sync.save(tmp_path / str(number), {"w": jnp.full(9, value, jnp.bfloat16)})
    weights = {tmp_path / str(n): 1 / 8 for n in range(8)}
    found = ckpt.sync.merge(weights, like={"w": jnp.zeros(9)}, adapt=ckpt.Adapt(cast="float32"))
    assert found["w"].tolist() == [np.mean(values)] * 9


def test_it_is_what_convert_writes(steps: dict[Path, float], tmp_path: Path) -> None:
    ckpt.sync.convert(steps, tmp_path / "mean")
    written, merged = ckpt.sync.load(tmp_path / "mean"), ckpt.sync.merge(steps)
    for path, leaf in jax.tree_util.tree_leaves_with_path(merged["params"]):
        other = dict(jax.tree_util.tree_leaves_with_path(written["params"]))[path]
        np.testing.assert_allclose(np.asarray(leaf), np.asarray(other), rtol=1e-6)


def test_models_of_others_with_other_orders_of_names(tmp_path: Path) -> None:
    arrays = {"b.w": np.full((4, 3), 2, np.float32), "a": np.full(2, 4, np.float32)}
    save_file(arrays, tmp_path / "m.safetensors")
    ckpt.sync.save(tmp_path / "ours", {"a": jnp.zeros(2), "b": {"w": jnp.zeros((4, 3))}})
    weights = {tmp_path / "m.safetensors": 0.5, tmp_path / "ours": 0.5}
    like: Any = {"a": jnp.zeros(2), "b": {"w": jnp.zeros((4, 3))}}
    found = ckpt.sync.merge(weights, like=like)
    assert found["a"].tolist() == [2, 2]
    assert found["b"]["w"].tolist() == [[1] * 3] * 4


def test_one_array_in_one_checkpoint_may_be_two_in_another(tmp_path: Path) -> None:
    one, two = jnp.full(3, 1.0), jnp.full(3, 2.0)
    ckpt.sync.save(tmp_path / "tied", {"a": one, "b": one, "c": one})
    ckpt.sync.save(tmp_path / "split", {"a": two, "b": two * 5, "c": two})
    for weight in (0.25, 0.75):
        weights = {tmp_path / "tied": weight, tmp_path / "split": 1 - weight}
        written = tmp_path / f"mean of {weight}"
        ckpt.sync.convert(weights, written)
        for found in (ckpt.sync.merge(weights), ckpt.sync.load(written)):
            expected = {"a": 2, "b": 10, "c": 2}
            for name, other in expected.items():
                assert found[name].tolist() == [weight + (1 - weight) * other] * 3, (weight, name)
    weights = {tmp_path / "tied": 0.75, tmp_path / "split": 0.25}
    merged = ckpt.sync.merge(weights)
    assert merged["a"] is merged["c"]


def test_items_by_name(tmp_path: Path) -> None:
    for number in (1, 2):
        items = {"model": {"w": jnp.full(3, float(number))}, "notes": f"run {number}"}
        ckpt.sync.save(tmp_path / str(number), items=items)
    weights = {tmp_path / "1": 0.25, tmp_path / "2": 0.75}
    found = ckpt.sync.merge(weights)
    assert found["model"]["w"].tolist() == [1.75] * 3
    assert found["notes"] == "run 2"
    assert list(ckpt.sync.merge(weights, items=["model"])) == ["model"]


def test_each_process_of_a_job_reads_its_part(tmp_path: Path) -> None:
    for number in (1, 2):
        ckpt.sync.save(tmp_path / str(number), {"w": np.full((64, 8), number, np.float32)})
    for told in run_processes(4, "merge_in_job.py", tmp_path):
        assert told.value == {"same": True}


def test_trees_that_differ_are_listed_and_nothing_is_read(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "a", {"w": jnp.ones(3), "b": jnp.ones(2)})
    ckpt.sync.save(tmp_path / "b", {"w": jnp.ones(4), "c": 1})
    with pytest.raises(errors.TargetMismatchError) as told:
        ckpt.sync.merge({tmp_path / "a": 0.5, tmp_path / "b": 0.5})
    for part in ("3 leaves differ", "default.w: float32[3]", "default.c: nothing in"):
        assert part in str(told.value)


def test_damage_names_the_leaf(steps: dict[Path, float], tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", state(1))
    largest = max((tmp_path / "x/default/d").iterdir(), key=lambda each: each.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    with pytest.raises(errors.CorruptCheckpointError, match="not what was saved"):
        ckpt.sync.merge({**steps, tmp_path / "x": 0.0})


@pytest.mark.parametrize(
    ("weights", "text"),
    [({}, "each with its weight"), ({"x": "half"}, "weight of 'x'"), ({"x": True}, "weight of")],
)
def test_weights_are_numbers(weights: Any, text: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=text):
        ckpt.sync.merge(weights)


def test_one_checkpoint_under_two_names(steps: dict[Path, float], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(next(iter(steps)))
    with pytest.raises(errors.InvalidArgumentError, match="under two names"):
        ckpt.sync.merge({**steps, tmp_path / "link": 0.5})


def test_a_sum_is_said_and_taken(
    steps: dict[Path, float], caplog: pytest.LogCaptureFixture
) -> None:
    async def merge() -> Any:
        return await ckpt.merge(dict.fromkeys(steps, 1), at="scalar")

    with caplog.at_level(logging.WARNING, "ckpt"):
        assert asyncio.run(merge()) == 6
    assert "add up to 3, and not to 1" in caplog.text
