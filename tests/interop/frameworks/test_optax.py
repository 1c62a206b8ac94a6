"""Optax: the states of optimizers, fresh and after a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import ckpt
import ckpt.sync
from ckpt.testing.compare import differences
from tests.interop.frameworks.exact import comes_back

PARAMS = {
    "encoder": {"w": jnp.ones((4, 3)), "b": jnp.ones(3)},
    "decoder": {"w": jnp.ones((2, 2), jnp.bfloat16)},
}
SCHEDULE = optax.cosine_decay_schedule(1e-3, 100)
LABELS = {"encoder": "slow", "decoder": "fast"}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: optax.adam(1e-3),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE)),
    "masked": lambda: optax.masked(optax.adam(1e-3), {"encoder": True, "decoder": False}),
    "multi_transform": lambda: optax.multi_transform(
        {"slow": optax.adam(1e-3), "fast": optax.sgd(0.1, momentum=0.9)}, LABELS
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(
        learning_rate=SCHEDULE, weight_decay=0.1
    ),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-3), 2),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-3), 3),
    "adafactor": lambda: optax.adafactor(1e-3),
    "ema": lambda: optax.ema(0.9),
    "no state": lambda: optax.adaptive_grad_clip(0.1),
    "noise with a key": lambda: optax.add_noise(0.1, 0.5, key=jax.random.key(3)),
}


def step(optimizer: Any) -> Callable[[Any], Any]:
    return jax.jit(lambda state: optimizer.update(PARAMS, state, PARAMS))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_an_optimizer_comes_back_and_goes_on_bit_for_bit(
    tmp_path: Path, name: str
) -> None:
    optimizer = OPTIMIZERS[name]()
    fresh = optimizer.init(PARAMS)
    comes_back(tmp_path / "fresh", fresh)
    update = step(optimizer)
    state = update(update(fresh)[1])[1]
    found = comes_back(tmp_path / "used", state)
    assert differences(update(state), update(found)) == []


def test_no_weak_type_is_passed_on_to_arrays_that_are_otherwise_alike(tmp_path: Path) -> None:
    """The counters of a train state look the same and are not."""
    state = {"a": jnp.asarray(1), "b": jnp.int32(2), "c": jnp.asarray(3), "d": jnp.int32(4)}
    assert [leaf.weak_type for leaf in state.values()] == [True, False, True, False]
    ckpt.sync.save(tmp_path / "x", state)
    assert differences(state, ckpt.sync.load(tmp_path / "x")) == []


def test_moments_move_along_when_the_chain_gets_longer(tmp_path: Path) -> None:
    old, new = optax.adam(1e-3), optax.chain(optax.clip(1.0), optax.adam(1e-3))
    used = step(old)(old.init(PARAMS))[1]
    ckpt.sync.save(tmp_path / "old", {"opt_state": used})
    moved = ckpt.Adapt(rename={"opt_state": "opt_state.1"})
    with ckpt.sync.CheckpointManager(tmp_path / "new") as mgr:
        target = {"opt_state": new.init(PARAMS)}
        with pytest.raises(ckpt.errors.TargetMismatchError, match=r"opt_state\.1\.0\.count"):
            mgr.resume(target, source=tmp_path / "old")
        _, found = mgr.resume(target, source=tmp_path / "old", adapt=moved)
    assert differences((optax.EmptyState(), used), found["opt_state"]) == []


def test_injected_hyperparameters_are_the_saved_ones_until_they_are_set(tmp_path: Path) -> None:
    make = optax.inject_hyperparams(optax.sgd)
    ckpt.sync.save(tmp_path / "x", make(learning_rate=0.5).init(PARAMS))
    optimizer = make(learning_rate=0.25)
    found = ckpt.sync.load(tmp_path / "x", like=optimizer.init(PARAMS))
    for rate in (0.5, 0.125):
        found.hyperparams["learning_rate"] = jnp.float32(rate)
        updates, _ = optimizer.update({"w": jnp.ones(2)}, found)
        assert updates["w"].tolist() == [-rate, -rate]
