"""States that follow from a number, so that a child and the test agree on every byte."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

__all__ = ["state_of"]

# Twelve batches' worth of small leaves would prove nothing more than these.
SMALL_LEAVES = 40


def state_of(number: int, *, large: int = 1 << 20) -> dict[str, Any]:
    """A state of 7.5 MiB (with the default `large`) that only this number has.

    Args:
        number: A step, or a version of one.
        large: Elements of one of its large arrays; the others follow.
    """
    random = np.random.default_rng(number)

    def floats(*shape: int) -> np.ndarray[Any, Any]:
        # All bit patterns, NaNs with payloads among them.
        count = int(np.prod(shape)) * 4
        return np.frombuffer(random.bytes(count), np.float32).reshape(shape)

    return {
        "params": {"kernel": floats(large // 1024, 1024), "embed": floats(large // 4)},
        "opt": [floats(large // 2), {"count": np.int64(number)}],
        "small": {f"bias_{n}": floats(7 + n) for n in range(SMALL_LEAVES)},
        "device": jnp.asarray(random.integers(0, 1 << 30, large // 8), jnp.int32),
        "number": number,
        "name": f"number {number}",
        "flag": number % 2 == 0,
    }
