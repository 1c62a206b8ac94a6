"""LoRA: the base is a step of another run, on whatever mesh, and only the adapter is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding

import ckpt
import ckpt.sync
from ckpt.testing.compare import differences
from tests.support.trees import P, mesh, sharded

TX = optax.adam(1e-2)
X = jax.random.normal(jax.random.key(0), (4, 8))
# The leaves of the base that the adapter's state has as well are not to be taken for its own.
PARENT_ONLY = ckpt.Adapt(select="params", missing="keep", extra="ignore")


def init_params() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(1))
    return {"up": jax.random.normal(keys[0], (8, 16)), "down": jax.random.normal(keys[1], (16, 8))}


def init_adapter() -> dict[str, Any]:
    adapter = {"a": jax.random.normal(jax.random.key(2), (8, 2)), "b": jnp.zeros((2, 16))}
    return {"adapter": adapter, "opt_state": TX.init(adapter)}


@jax.jit
def adapter_step(state: Any, base: Any) -> Any:
    def loss_of(adapter: Any) -> jax.Array:
        return jnp.mean((X @ (base["up"] + adapter["a"] @ adapter["b"]) @ base["down"] - 1) ** 2)

    updates, opt_state = TX.update(jax.grad(loss_of)(state["adapter"]), state["opt_state"])
    return {"adapter": optax.apply_updates(state["adapter"], updates), "opt_state": opt_state}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The step 300 of another run, on a mesh of 2 by 4 devices, with a counter at 300."""
    params = {name: sharded(each, "data", "model") for name, each in init_params().items()}
    adam, rest = TX.init(params)
    with ckpt.sync.CheckpointManager(tmp_path / "base") as mgr:
        opt_state = (adam._replace(count=jnp.int32(300)), rest)
        mgr.save(300, {"params": params, "opt_state": opt_state})
    return tmp_path / "base" / "300"


def tune(root: Path, base: Path, steps: int, rows: Any) -> tuple[int, Any, Any]:
    """Go on to the last step as a process does that has just started."""
    params = ckpt.sync.load(base, like=ckpt.abstract(init_params, rows), at="params")
    with ckpt.sync.CheckpointManager(root) as mgr:
        start, state = mgr.resume(init_adapter, source=base, adapt=PARENT_ONLY)
        if start == 0:
            assert differences(init_adapter(), state) == []
        for step in range(start, steps):
            state = adapter_step(state, params)
            mgr.save(step, state)
    return start, state, params


def test_an_adapter_goes_on_bit_for_bit_beside_a_base_that_is_not_saved_again(
    tmp_path: Path, base: Path
) -> None:
    rows = NamedSharding(mesh(8, 1), P("data"))
    _, wanted, _ = tune(tmp_path / "whole", base, 4, rows)
    tune(tmp_path / "stopped", base, 2, rows)
    start, found, params = tune(tmp_path / "stopped", base, 4, rows)
    assert start == 2
    assert differences(wanted, found) == []
    assert differences(jax.device_put(init_params(), rows), params) == []

    info = ckpt.sync.metadata(tmp_path / "stopped" / "3").info
    assert info.nbytes == sum(each.nbytes for each in jax.tree.leaves(init_adapter()))
    # Whoever has the adapter finds the base.
    assert info.parent is not None
    assert (info.parent.path, info.parent.step) == (str(base), 300)
    again = ckpt.sync.load(info.parent.path, like=ckpt.abstract(init_params, rows), at="params")
    assert differences(params, again) == []


def test_nothing_but_the_parent_is_taken_from_the_base(tmp_path: Path, base: Path) -> None:
    """The trap of the guide: without `select`, the counter of the other optimizer is taken."""
    loose = ckpt.Adapt(missing="keep", extra="ignore")
    for name, adapt, count in (("one", PARENT_ONLY, 0), ("other", loose, 300)):
        with ckpt.sync.CheckpointManager(tmp_path / name) as mgr:
            _, state = mgr.resume(init_adapter, source=base, adapt=adapt)
            assert int(state["opt_state"][0].count) == count


def test_the_adapters_of_a_flax_model_have_a_plain_model_of_another_run_as_base(
    tmp_path: Path,
) -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Plain(nnx.Module):  # type: ignore[name-defined]
        def __init__(self, rngs: Any) -> None:
            self.up = nnx.Linear(8, 8, rngs=rngs)

    class Adapted(nnx.Module):  # type: ignore[name-defined]
        def __init__(self, rngs: Any) -> None:
            linear = nnx.Linear(8, 8, rngs=rngs)
            self.up = nnx.LoRA(8, 2, 8, base_module=linear, rngs=rngs)

    plain = Plain(nnx.Rngs(0))
    placed = jax.device_put(nnx.state(plain), NamedSharding(mesh(), P("model")))
    with ckpt.sync.CheckpointManager(tmp_path / "base") as mgr:
        mgr.save(7, {"model": placed}, durable=True)

    model = Adapted(nnx.Rngs(1))
    _, rest = nnx.split_state(nnx.state(model), nnx.LoRAParam, ...)
    rows = NamedSharding(mesh(8, 1), P("data"))
    adapt = ckpt.Adapt(select="model", rename={"model.up": "up.base_module"})
    found = ckpt.sync.load(tmp_path / "base" / "7", like=ckpt.abstract(rest, rows), adapt=adapt)
    nnx.update(model, found)
    base = jax.device_put(nnx.state(plain.up), rows)
    assert differences(base, nnx.state(model.up.base_module)) == []

    # Now the adapter has a run of its own.
    trained = jax.tree.map(lambda leaf: leaf + 1, nnx.state(model, nnx.LoRAParam))
    with ckpt.sync.CheckpointManager(tmp_path / "tuned") as mgr:
        info = mgr.save(0, trained).result()
    assert info.nbytes == sum(each.nbytes for each in jax.tree.leaves(trained))
    again = Adapted(nnx.Rngs(2))
    nnx.update(again, found)
    with ckpt.sync.CheckpointManager(tmp_path / "tuned") as mgr:
        start, state = mgr.resume(nnx.state(again, nnx.LoRAParam))
        nnx.update(again, state)
    assert start == 1
    assert differences(trained, nnx.state(again, nnx.LoRAParam)) == []
    assert differences(base, nnx.state(again.up.base_module)) == []
