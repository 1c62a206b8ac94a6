"""Orbax reads steps that share files, also when the steps they came from are gone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp0
import pytest
from orbax.checkpoint import v1 as ocp

import ckpt
import ckpt.sync
from tests.support.trees import abstract, assert_same


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("same", [True, False])
def test_orbax_reads_steps_that_share_files(tmp_path: Path, same: bool, compressed: bool) -> None:
    root = tmp_path / "run"
    random = np.random.default_rng(0)
    base = {f"w{n}": jnp.array(random.standard_normal((300, 1024 + n)), "f4") for n in range(4)}
    base |= {f"b{n}": jnp.array(random.standard_normal(50), "f4") for n in range(20)}
    formats = {"w1": ckpt.ArrayFormat(compression="zstd")} if compressed else None
    kept: dict[int, Any] = {}
    with ckpt.sync.CheckpointManager(root, formats=formats) as mgr:
        for step in range(4):
            frozen = base if same else {name: jnp.copy(leaf) for name, leaf in base.items()}
            # The second save finds one of the frozen arrays changed.
            if step == 1:
                frozen = frozen | {"w2": frozen["w2"] + 1}
            kept[step] = frozen | {"adapter": jnp.full((8, 8), step, "f4")}
            info = mgr.save(step, kept[step]).result()
            assert (info.statistics.shared_bytes > 2_000_000) == (step > 0)
    shutil.rmtree(root / "0")
    del kept[0]
    with ocp0.CheckpointManager(root) as manager:
        for step, state in kept.items():
            args = ocp0.args.StandardRestore(abstract(state))
            assert_same(manager.restore(step, args=args), state, placed=False)
            assert_same(ocp.load(root / str(step), abstract(state)), state, placed=False)
