"""A state that every step changes in every bit, and lines about it."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

__all__ = ["FIRST", "fresh", "say", "say_end", "stepped"]

# So many steps are made before the move.
FIRST = 3
_TX = optax.adam(0.1)


def fresh(seed: int = 0) -> dict[str, Any]:
    params = {"w": jax.random.normal(jax.random.key(seed), (16, 8)), "b": jnp.zeros(8)}
    return {"params": params, "opt": _TX.init(params), "step": jnp.int32(0)}


@jax.jit
def stepped(state: dict[str, Any], batch: Any = 1.0) -> dict[str, Any]:
    grads = jax.tree.map(lambda x: jnp.sin(x) * batch + 0.1, state["params"])
    updates, opt = _TX.update(grads, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt, "step": state["step"] + 1}


def say(step: int) -> None:
    sys.stdout.write(f"step {step}\n")
    sys.stdout.flush()


def say_end(state: Any) -> None:
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        found.update(jax.tree_util.keystr(path).encode())
        found.update(np.asarray(leaf).tobytes())
    sys.stdout.write(f"end {found.hexdigest()}\n")
