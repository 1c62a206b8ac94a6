"""A service that answers with the newest weights of a run which is still being trained.

    python docs/examples/fastapi_service.py               # train
    python docs/examples/fastapi_service.py --serve 8000  # in another terminal
    curl 'http://127.0.0.1:8000/step'
    curl 'http://127.0.0.1:8000/predict?x=0.5'

It needs `pip install fastapi uvicorn`. The service prints each step that it loads: without its
optimizer state, and while requests are answered with the step before. Stop the trainer at any time,
with Ctrl-C or `kill -9`, and start it again: it says at which step it goes on, and its last line is
that of a run which was never stopped.
"""

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import uvicorn
from fastapi import FastAPI, HTTPException

import ckpt

Params = dict[str, jax.Array]
TEST = 2**31 - 1  # the number of a batch that no step trains on
OPTIMIZER = optax.adam(1e-2)


def init_params() -> Params:
    """Return the parameters of a new model."""
    keys = jax.random.split(jax.random.key(0))
    return {"hidden": jax.random.normal(keys[0], (64,)), "out": jax.random.normal(keys[1], (64,))}


def init_state() -> dict[str, Any]:
    """Return the state of a new run."""
    params = init_params()
    return {"params": params, "opt_state": OPTIMIZER.init(params)}


@jax.jit
def predict(params: Params, x: jax.Array) -> jax.Array:
    """Return the answers of the model."""
    return jnp.tanh(x[:, None] * params["hidden"]) @ params["out"]


def loss_of(params: Params, number: int) -> jax.Array:
    """Return the mean squared error on the batch of this number, always the same."""
    x = jax.random.normal(jax.random.fold_in(jax.random.key(1), number), (32,))
    return jnp.mean((predict(params, x) - jnp.sin(x)) ** 2)


@partial(jax.jit, donate_argnums=0)
def train_step(state: dict[str, Any], number: int) -> dict[str, Any]:
    """Make one step."""
    grads = jax.grad(loss_of)(state["params"], number)
    updates, opt_state = OPTIMIZER.update(grads, state["opt_state"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}


def train(root: str, steps: int) -> None:
    """Train to the last step, from wherever the run has come to."""
    last = ckpt.save_when.Steps([steps - 1])
    with ckpt.sync.CheckpointManager(
        root,
        save_when=ckpt.save_when.Any(ckpt.save_when.EverySteps(50), last),
        keep=3,
    ) as mgr:
        start, state = mgr.resume(init_state)
        print(f"resumed at step {start}" if start else "a new run", flush=True)
        for step in range(start, steps):
            state = train_step(state, step)
            mgr.save(step, state)
    print(f"done: step {steps - 1}, loss {loss_of(state['params'], TEST)}")


def make_app(root: str) -> FastAPI:
    """Return the service."""
    served: tuple[ckpt.StepInfo, Params] | None = None

    async def follow() -> None:
        nonlocal served
        async for info in ckpt.watch(root, only_latest=True, poll_interval=0.2):
            served = info, await ckpt.load(info.path, like=ckpt.abstract(init_params), at="params")
            print(f"serving step {info.step}", flush=True)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        following = asyncio.create_task(follow())
        yield
        following.cancel()  # the step that is served is no longer pinned

    app = FastAPI(lifespan=lifespan)

    def newest() -> tuple[ckpt.StepInfo, Params]:
        if served is None:
            raise HTTPException(503, "the run has saved no step yet")
        return served

    @app.get("/step")
    def step() -> ckpt.StepInfo:
        return newest()[0]

    @app.get("/predict")
    def answer(x: float) -> dict[str, Any]:
        info, params = newest()
        return {"step": info.step, "y": float(predict(params, jnp.array([x]))[0])}

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="runs/served")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--serve", type=int, metavar="PORT")
    args = parser.parse_args()
    if args.serve is None:
        train(args.root, args.steps)
    else:
        uvicorn.run(make_app(args.root), port=args.serve)
