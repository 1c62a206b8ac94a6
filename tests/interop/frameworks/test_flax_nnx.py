"""Flax NNX: states, optimizers, sharding metadata, and pure dicts in exchange for states."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

nnx = pytest.importorskip("flax.nnx")

import ckpt  # noqa: E402
import ckpt.sync  # noqa: E402
from ckpt.testing.compare import differences  # noqa: E402
from tests.interop.frameworks.exact import (  # noqa: E402
    abstract,
    by_jax,
    comes_back,
    comes_back_with_a_target,
    told_at_load,
)
from tests.support.trees import mesh  # noqa: E402


class Adapter(nnx.Variable):  # type: ignore[name-defined]
    """A kind of variable that the application made up."""


class Net(nnx.Module):  # type: ignore[name-defined]
    """Everything that NNX has a kind of variable for; more than ten layers."""

    def __init__(self, rngs: Any) -> None:
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(11)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.adapter = Adapter(jnp.full((4, 2), 0.5, jnp.bfloat16), rank=2)
        self.seen = nnx.Variable(jnp.int32(0))
        self.width = 4

    def __call__(self, x: Any) -> Any:
        self.seen.set_value(self.seen.get_value() + 1)
        for layer in self.layers:
            x = nnx.relu(layer(x)) + x
        return self.drop(self.norm(x))


def net(seed: int = 0) -> Any:
    return Net(nnx.Rngs(seed, dropout=seed + 1))


@functools.cache
def train_step() -> Callable[..., Any]:
    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    return step


def trained(seed: int, steps: int) -> tuple[Any, Any]:
    model = net(seed)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    for number in range(steps):
        train_step()(model, optimizer, jnp.full((8, 4), number + 1.0))
    return model, optimizer


@pytest.fixture(scope="module")
def states() -> dict[str, Any]:
    model, optimizer = trained(0, steps=3)
    return {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}


def test_a_state_of_all_kinds_of_variables_comes_back_as_that_state(
    tmp_path: Path, states: dict[str, Any]
) -> None:
    found = comes_back(tmp_path / "x", states)
    model = found["model"]
    assert type(model) is nnx.State
    assert type(model["norm"]["mean"]) is nnx.BatchStat
    assert type(model["drop"]["rngs"]["key"]) is nnx.RngKey
    assert model["drop"]["rngs"]["key"].tag == "dropout"
    assert type(model["adapter"]) is Adapter
    assert model["adapter"].rank == 2
    assert list(model["layers"]) == list(range(11))


def test_a_filtered_and_a_flat_state_come_back(tmp_path: Path, states: dict[str, Any]) -> None:
    params, rest = nnx.split_state(states["model"], nnx.Param, ...)
    comes_back(tmp_path / "x", (params, rest, nnx.to_flat_state(states["model"])))


def test_a_state_of_which_a_pure_dict_was_saved_and_the_other_way_round(
    tmp_path: Path, states: dict[str, Any]
) -> None:
    state = states["model"]
    pure = nnx.to_pure_dict(state)
    ckpt.sync.save(tmp_path / "state", state)
    comes_back(tmp_path / "pure", pure)
    assert isinstance(ckpt.sync.load(tmp_path / "pure")["layers"][10]["kernel"], jax.Array)
    for like, wanted in ((state, state), (abstract(state), state), (pure, pure)):
        for name in ("state", "pure"):
            found = ckpt.sync.load(tmp_path / name, like=like)
            assert type(found) is type(like)
            assert differences(by_jax(wanted), found) == [], name
    # And by way of what NNX itself has for pure dicts.
    again = nnx.state(net(5))
    nnx.replace_by_pure_dict(again, ckpt.sync.load(tmp_path / "pure"))
    assert differences(state, again) == []


@pytest.mark.slow
@pytest.mark.parametrize("version", ["v0", "v1"])
def test_a_run_of_orbax_with_a_state_goes_on(tmp_path: Path, version: str) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    state, fresh = nnx.state(net()), nnx.state(net(7))
    if version == "v0":
        with ocp.CheckpointManager(tmp_path) as theirs:
            theirs.save(3, args=ocp.args.StandardSave(state))
            theirs.wait_until_finished()
    else:
        from orbax.checkpoint.experimental import v1

        with v1.training.Checkpointer(tmp_path) as theirs:
            theirs.save(3, state)
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        begin, found = mgr.resume(fresh)
    assert begin == 4
    assert differences(by_jax(state), found) == []
    step = tmp_path / "3"
    assert differences(by_jax(state), ckpt.sync.load(step, like=fresh)) == []
    kernel = state["norm"]["scale"]
    part = ckpt.sync.load(step, like=kernel, at="norm.scale")
    assert differences(by_jax(kernel), part) == []


def test_training_goes_on_bit_for_bit_after_an_update_with_what_came_back(tmp_path: Path) -> None:
    model, optimizer = trained(0, steps=3)
    ckpt.sync.save(tmp_path / "x", {"m": nnx.state(model), "o": nnx.state(optimizer)})
    for like in (True, False):
        again, its_optimizer = trained(7, steps=1)
        target = {"m": nnx.state(again), "o": nnx.state(its_optimizer)} if like else None
        found = ckpt.sync.load(tmp_path / "x", like=target)
        nnx.update(again, found["m"])
        nnx.update(its_optimizer, found["o"])
        straight, its = trained(0, steps=3)
        x = jnp.full((8, 4), 9.0)
        losses = [
            train_step()(one, other, x) for one, other in ((again, its_optimizer), (straight, its))
        ]
        assert float(losses[0]) == float(losses[1])
        assert differences(nnx.state(straight), nnx.state(again)) == []
        assert differences(nnx.state(its), nnx.state(its_optimizer)) == []


def test_a_model_that_was_never_made_is_target_enough(
    tmp_path: Path, states: dict[str, Any]
) -> None:
    ckpt.sync.save(tmp_path / "x", states["model"])
    shapes = nnx.eval_shape(lambda: net(3))
    found = ckpt.sync.load(tmp_path / "x", like=nnx.state(shapes))
    assert differences(states["model"], found) == []
    nnx.update(shapes, found)
    shapes.eval()
    assert shapes(jnp.ones((2, 4))).shape == (2, 4)


@pytest.mark.parametrize("eager", [True, False])
def test_partitioned_parameters_keep_their_names_and_their_places(
    tmp_path: Path, eager: bool
) -> None:
    with jax.set_mesh(mesh()), nnx.use_eager_sharding(eager):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("data", "model"))
        model = nnx.Linear(8, 8, kernel_init=init, rngs=nnx.Rngs(0))
        state = nnx.state(model)
        placed = jax.device_put(state, nnx.get_named_sharding(state, mesh()))
    found = comes_back(tmp_path / "x", placed)
    assert found["kernel"].get_metadata() == placed["kernel"].get_metadata()
    names = [found["kernel"].get_metadata(key, None) for key in ("out_sharding", "sharding_names")]
    assert ("data", "model") in names
    assert found["kernel"].get_value().sharding.spec == jax.P("data", "model")
    # Onto another mesh: the target says where to.
    other = jax.device_put(state, nnx.get_named_sharding(state, mesh(4, 2)))
    moved = ckpt.sync.load(tmp_path / "x", like=abstract(other))
    assert differences(other, moved) == []


def test_a_graph_definition_holds_code_and_has_to_be_brought_along(tmp_path: Path) -> None:
    split = nnx.split(net())
    ckpt.sync.save(tmp_path / "x", split)
    comes_back_with_a_target(tmp_path / "x", split)
    found, messages = told_at_load(tmp_path / "x")
    assert differences(split[1], found[1]) == []
    assert type(found[0]) is ckpt.types.UnknownNode
    (message,) = messages
    assert "GraphDef (its attributes, nodes could not be stored: pass like=)" in message
    model = nnx.merge(split[0], found[1])
    assert differences(split[1], nnx.state(model)) == []


def test_a_module_is_a_tree_too_and_comes_back_onto_one(tmp_path: Path) -> None:
    model = net()
    ckpt.sync.save(tmp_path / "x", model)
    comes_back_with_a_target(tmp_path / "x", model)
    found, messages = told_at_load(tmp_path / "x")
    assert len(messages) == 1
    assert "test_flax_nnx:Net" in messages[0]
    # All values are there, under the names they have in the module.
    leaves = zip(jax.tree.leaves(model), jax.tree.leaves(found), strict=True)
    assert all(differences(one, other) == [] for one, other in leaves)


@pytest.mark.parametrize("value", [lambda value: 2 * value, mesh()], ids=["code", "a mesh"])
def test_metadata_that_cannot_be_stored_is_told_and_taken_from_a_target(
    tmp_path: Path, value: Any
) -> None:
    state = nnx.State({"a": nnx.Param(jnp.ones(3), mine=value), "b": nnx.Param(jnp.zeros(2))})
    ckpt.sync.save(tmp_path / "x", state)
    comes_back_with_a_target(tmp_path / "x", state)
    found, messages = told_at_load(tmp_path / "x")
    assert len(messages) == 1
    assert "flax.nnx.variablelib:Param (its aux could not be stored: pass like=)" in messages[0]
    assert np.asarray(found["a"]["value"]).tolist() == [1, 1, 1]
    assert differences(state["b"], found["b"]) == []


def test_random_streams_go_on_where_they_were(tmp_path: Path) -> None:
    rngs = nnx.Rngs(params=jax.random.key(0, impl="rbg"), dropout=1)
    rngs.params()
    rngs.dropout()
    found = comes_back(tmp_path / "x", nnx.state(rngs))
    again = nnx.Rngs(params=jax.random.key(9, impl="rbg"), dropout=2)
    nnx.update(again, found)
    for name in ("params", "dropout", "params"):
        assert differences(rngs[name](), again[name]()) == []


def test_a_run_that_is_resumed_into_fresh_modules_draws_the_numbers_that_come_next(
    tmp_path: Path,
) -> None:
    def go_on(seed: int, root: Path, steps: int) -> tuple[int, Any, list[Any]]:
        """As a process does that has just started; the seed is not what decides."""
        run = {"net": net(seed), "rngs": nnx.Rngs(noise=seed)}
        drawn = []
        with ckpt.sync.CheckpointManager(root) as mgr:
            start, state = mgr.resume(nnx.state(run))
            nnx.update(run, state)
            for step in range(start, steps):
                drawn.append((run["net"].drop(jnp.ones(64)), run["rngs"].noise()))
                mgr.save(step, nnx.state(run))
        return start, nnx.state(run), drawn

    _, wanted, numbers = go_on(0, tmp_path / "whole", 4)
    go_on(0, tmp_path / "stopped", 2)
    start, found, rest = go_on(5, tmp_path / "stopped", 4)
    assert start == 2
    assert differences(wanted, found) == []
    assert differences(numbers[2:], rest) == []
    assert differences(numbers[:2], rest) != []


def test_a_layer_in_two_places_stays_one_by_way_of_the_state(tmp_path: Path) -> None:
    class Tied(nnx.Module):  # type: ignore[name-defined]
        def __init__(self, rngs: Any) -> None:
            self.one = nnx.Linear(2, 2, rngs=rngs)
            self.other = self.one

    model = Tied(nnx.Rngs(0))
    ckpt.sync.save(tmp_path / "state", nnx.state(model))
    ckpt.sync.save(tmp_path / "module", model)
    again = Tied(nnx.Rngs(1))
    nnx.update(again, ckpt.sync.load(tmp_path / "state", like=nnx.state(again)))
    assert again.one is again.other
    assert differences(nnx.state(model), nnx.state(again)) == []
    # The module is a tree to jax, in which every layer has one place.
    assert ckpt.sync.load(tmp_path / "module", like=again).one is not again.other


def test_an_evaluator_merges_what_it_reads_into_a_module_it_never_made(tmp_path: Path) -> None:
    model = net()
    ckpt.sync.save(tmp_path / "x", {"model": nnx.state(model), "other": jnp.ones(2)})
    graphdef, target = nnx.split(nnx.eval_shape(lambda: net(3)))
    merged = nnx.merge(graphdef, ckpt.sync.load(tmp_path / "x", like=target, at="model"))
    assert type(merged) is Net
    assert differences(nnx.state(model), nnx.state(merged)) == []
