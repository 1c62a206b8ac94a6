"""Checkpoints of T5X: a file of msgpack that says where each array is, and arrays of zarr."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding

import ckpt
import ckpt.sync
from tests.support.trees import P, mesh, structure

serialization = pytest.importorskip("flax.serialization")
traverse_util = pytest.importorskip("flax.traverse_util")

STATE: dict[str, Any] = {
    "state": {
        "step": np.int32(1000),
        "param_states": {"encoder": {"kernel": {"v_row": np.arange(6, dtype=np.float32)}}},
    },
    "target": {
        "encoder": {"kernel": np.arange(48, dtype=np.float32).reshape(6, 8)},
        "token_embedder": {"embedding": np.arange(32).reshape(8, 4).astype(jnp.bfloat16)},
    },
    "flax_mutables": {},
}


def save_as_t5x(folder: Path, state: dict[str, Any], *, bucket: str = "") -> None:
    """Save as `t5x.checkpoints.Checkpointer` does; with a bucket the specs are those of a store."""
    folder.mkdir()
    written = {}
    for keys, leaf in traverse_util.flatten_dict(state, keep_empty_nodes=True).items():
        written[keys] = leaf
        if not isinstance(leaf, np.ndarray):
            continue
        place = {"driver": "gcs", "bucket": bucket} if bucket else {"driver": "file"}
        spec: dict[str, Any] = {
            "driver": "zarr",
            "dtype": leaf.dtype.name,
            "kvstore": {**place, "path": ".".join(keys)},
            "metadata": {
                "compressor": {"id": "gzip"},
                "shape": list(leaf.shape),
                "chunks": [max(1, n // 2) for n in leaf.shape],
            },
        }
        written[keys] = ts.Spec(spec).to_json()
        absolute = copy.deepcopy(spec)
        absolute["kvstore"] = {"driver": "file", "path": str(folder / ".".join(keys))}
        ts.open(absolute, create=True).result().write(leaf).result()
    tree = {"version": 3, "optimizer": traverse_util.unflatten_dict(written)}
    (folder / "checkpoint").write_bytes(serialization.to_bytes(tree))


@pytest.mark.parametrize("bucket", ["", "t5x-dummy-bucket"])
def test_arrays_are_found_where_the_specs_say(bucket: str, tmp_path: Path) -> None:
    save_as_t5x(tmp_path / "checkpoint_1000", STATE, bucket=bucket)
    found = ckpt.sync.load(tmp_path / "checkpoint_1000")
    assert found["version"] == 3
    assert structure(found["optimizer"]) == structure(STATE)
    for one, other in zip(jax.tree.leaves(found["optimizer"]), jax.tree.leaves(STATE), strict=True):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)


def test_the_parameters_alone_onto_a_mesh(tmp_path: Path) -> None:
    save_as_t5x(tmp_path / "checkpoint_1000", STATE)
    columns = NamedSharding(mesh(), P(None, "data"))
    target: dict[str, Any] = {
        "encoder": {"kernel": jax.ShapeDtypeStruct((6, 8), jnp.bfloat16, sharding=columns)},
        "token_embedder": {"embedding": ...},
    }
    found: Any = ckpt.sync.load(tmp_path / "checkpoint_1000", like=target, at="optimizer.target")
    assert found["encoder"]["kernel"].sharding == columns
    assert np.array_equal(found["encoder"]["kernel"], STATE["target"]["encoder"]["kernel"])


def test_a_run_begins_from_it_and_a_root_is_listed(tmp_path: Path) -> None:
    save_as_t5x(tmp_path / "checkpoint_1000", STATE)
    names = ckpt.step_names.Standard("checkpoint")
    fresh: dict[str, Any] = {"version": 3, "optimizer": STATE}
    with ckpt.sync.CheckpointManager(tmp_path, step_names=names) as mgr:
        start, found = mgr.resume(fresh)
    assert start == 1001
    assert found["optimizer"]["state"]["step"] == 1000
