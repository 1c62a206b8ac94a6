"""Virtual steps in a bucket, over files of others in the same bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import save_file

import ckpt
from ckpt import errors
from tests.stores.places import Place

WEIGHTS = {"a.w": np.arange(300_000, dtype=np.float32).reshape(300, 1000), "a.b": np.ones(3, "i4")}


def models(folder: Path, change: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: each + change for name, each in WEIGHTS.items()}, folder / "m.safetensors")
    return folder


def assert_weights(found: Any) -> None:
    for name, each in WEIGHTS.items():
        assert np.array_equal(found["a"][name[2:]], each)


def test_safetensors_are_adopted_where_they_are(bucket: Place, tmp_path: Path) -> None:
    bucket.upload(models(tmp_path / "m"), "models")
    source = bucket.root("models/m.safetensors")
    info = ckpt.sync.adopt(source, bucket.root("run"), step=1)
    assert info.nbytes == sum(each.nbytes for each in WEIGHTS.values())
    # The place of the root tells how its bucket is reached.
    with ckpt.sync.CheckpointManager(bucket.root("run")) as mgr:
        assert_weights(mgr.restore(1))
        assert mgr.verify(1).first_digests == 2
        assert_weights(mgr.restore(1))
        assert mgr.verify(1).ok
    own = sum(len(data) for key, data in bucket.objects().items() if key.startswith("run/"))
    assert own < 8192


@pytest.mark.parametrize("verified", [False, True])
def test_objects_that_were_written_again_are_refused(
    bucket: Place, tmp_path: Path, verified: bool
) -> None:
    bucket.upload(models(tmp_path / "m"), "models")
    ckpt.sync.adopt(bucket.root("models"), bucket.root("ours"))
    if verified:
        ckpt.sync.verify(bucket.root("ours"))
    bucket.upload(models(tmp_path / "m", change=1), "models")
    with pytest.raises(errors.CorruptCheckpointError, match=r"m\.safetensors"):
        ckpt.sync.load(bucket.root("ours"))
    bucket.drop("models/m.safetensors")
    with pytest.raises(errors.CorruptCheckpointError, match="is missing; put it back"):
        ckpt.sync.load(bucket.root("ours"))


def test_a_step_of_orbax_is_adopted(bucket: Place, tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, args=ocp.args.StandardSave({"a": {k[2:]: v for k, v in WEIGHTS.items()}}))
        manager.wait_until_finished()
    bucket.upload(tmp_path / "run", "theirs")
    ckpt.sync.adopt(bucket.root("theirs/3"), bucket.root("ours"))
    assert_weights(ckpt.sync.load(bucket.root("ours")))
    assert ckpt.sync.verify(bucket.root("ours")).ok
    assert_weights(ckpt.sync.load(bucket.root("ours")))
