"""NumPyro: variational inference and Markov chains go on as if they had never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

numpyro = pytest.importorskip("numpyro")

import numpyro.distributions as dist  # noqa: E402
from numpyro.infer import HMC, MCMC, SVI, Trace_ELBO  # noqa: E402
from numpyro.infer.autoguide import AutoNormal  # noqa: E402

import ckpt  # noqa: E402
import ckpt.sync  # noqa: E402
from ckpt.testing.compare import differences  # noqa: E402
from tests.interop.frameworks.exact import comes_back, comes_back_with_a_target, told_at_load  # noqa: E402

X = jax.random.normal(jax.random.key(0), (20, 2))
DATA = (X, X @ jnp.array([1.0, -2.0]))


def model(x: Any, y: Any = None) -> None:
    slope = numpyro.sample("slope", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
    noise = numpyro.sample("noise", dist.LogNormal())
    numpyro.sample("y", dist.Normal(x @ slope, noise), obs=y)


def by_name() -> Any:
    return optax.adam(1e-2)


def by_number() -> Any:
    return numpyro.optim.Adam(1e-2)


def infer(root: Path, optimizer: Any, steps: int) -> tuple[int, Any, list[float]]:
    """Go on to the last step as a process does that has just started."""
    svi = SVI(model, AutoNormal(model), optimizer, Trace_ELBO())
    update, losses = jax.jit(svi.update), []
    with ckpt.sync.CheckpointManager(root) as mgr:
        start, state = mgr.resume(svi.init(jax.random.key(1), *DATA))
        for step in range(start, steps):
            state, loss = update(state, *DATA)
            losses.append(float(loss))
            mgr.save(step, state)
    return start, (state, svi.get_params(state)), losses


@pytest.mark.parametrize("optimizer", [by_name, by_number])
def test_variational_inference_goes_on_bit_for_bit(tmp_path: Path, optimizer: Any) -> None:
    _, wanted, losses = infer(tmp_path / "whole", optimizer(), 6)
    infer(tmp_path / "stopped", optimizer(), 3)
    start, found, rest = infer(tmp_path / "stopped", optimizer(), 6)
    assert (start, rest) == (3, losses[3:])
    assert differences(wanted, found) == []


def test_the_parameters_have_names_with_an_optimizer_of_optax(tmp_path: Path) -> None:
    states = {
        each: SVI(model, AutoNormal(model), each(), Trace_ELBO()).init(jax.random.key(1), *DATA)
        for each in (by_name, by_number)
    }
    comes_back(tmp_path / "named", states[by_name])
    array = ckpt.sync.open_array(tmp_path / "named", "optim_state.1.0.slope_auto_loc")
    assert array.shape == (2,)
    # The others hide the names in what is no data, and say so when it is missing.
    ckpt.sync.save(tmp_path / "numbered", states[by_number])
    comes_back_with_a_target(tmp_path / "numbered", states[by_number])
    _, messages = told_at_load(tmp_path / "numbered")
    assert len(messages) == 1
    assert "OptimizerState (its aux could not be stored: pass like=)" in messages[0]


def sampler() -> Any:
    return MCMC(
        # Compiled in half the time of NUTS, with the same state.
        HMC(model, trajectory_length=None, num_steps=3),
        num_warmup=30,
        num_samples=10,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )


def go_on(mcmc: Any) -> Any:
    """Draw the next samples of a chain."""
    mcmc.run(mcmc.post_warmup_state.rng_key, *DATA)
    mcmc.post_warmup_state = mcmc.last_state
    return mcmc.get_samples(group_by_chain=True)


def test_a_chain_goes_on_with_the_samples_that_would_have_come_next(tmp_path: Path) -> None:
    straight = sampler()
    straight.warmup(jax.random.key(1), *DATA)
    items = {"samples": go_on(straight), "chain": straight.last_state}
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(0, items=items)
    wanted = go_on(straight)

    again = sampler()
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        found = mgr.restore()
    assert differences(items, found) == []
    assert type(found["chain"]) is type(straight.last_state)
    again.post_warmup_state = found["chain"]
    assert differences(wanted, go_on(again)) == []
    assert differences(straight.last_state, again.last_state) == []
    # They are others than before: the chain has not started anew.
    assert differences(wanted, found["samples"]) != []
