"""Haiku: parameters and states are dicts of dicts, whose keys are paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

hk = pytest.importorskip("haiku")

import ckpt.sync  # noqa: E402
from ckpt.testing.compare import differences  # noqa: E402
from tests.interop.frameworks.exact import by_jax, comes_back  # noqa: E402


def network(x: Any) -> Any:
    x = hk.nets.MLP([4, 4], name="inner")(x)
    x = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(x, True)
    return hk.dropout(hk.next_rng_key(), 0.5, x)


def test_parameters_and_state_come_back_and_go_on(tmp_path: Path) -> None:
    transformed = hk.transform_with_state(network)
    apply = jax.jit(transformed.apply)
    x = jnp.ones((2, 3))
    params, state = transformed.init(jax.random.key(0), x)
    _, state = apply(params, state, jax.random.key(1), x)
    saved = {"params": params, "state": state, "rng": jax.random.PRNGKey(2)}
    found = comes_back(tmp_path / "x", saved)
    assert "inner/~/linear_0" in found["params"]
    # One key with slashes, which patterns may have as well.
    layer = ckpt.sync.load(tmp_path / "x", at="params.inner/~/linear_0")
    assert differences(by_jax(params["inner/~/linear_0"]), layer) == []
    both = [apply(each["params"], each["state"], each["rng"], x) for each in (saved, found)]
    assert differences(*both) == []
