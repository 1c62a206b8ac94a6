"""What formats cost and save: 512 MiB of three kinds of values in several formats.

Prints a table: `python -m benchmarks.formats [directory]`. Best of three saves after a first one,
and of three restores from the page cache.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ckpt

MIB = 1 << 20
LEAVES = 32
SAVES = RESTORES = 3
Array = np.ndarray[Any, Any]


def random_bits(random: np.random.Generator, count: int) -> Array:
    return random.integers(0, 1 << 32, count, np.uint32).view(np.float32)


def normal(random: np.random.Generator, count: int) -> Array:
    return random.standard_normal(count, np.float32)


def half_zeros(random: np.random.Generator, count: int) -> Array:
    """Every other value zero, the others of few bits, as weights are that came from bfloat16."""
    values = normal(random, count)
    values[::2] = 0
    return values.astype(jnp.bfloat16).astype(np.float32)


VALUES: Mapping[str, Callable[[np.random.Generator, int], Array]] = {
    "random bits": random_bits,
    "normal": normal,
    "half zeros": half_zeros,
}
FORMATS = {
    "none": ckpt.ArrayFormat(),
    "zstd, level 1": ckpt.ArrayFormat(compression=ckpt.Zstd(level=1)),
    "blosc": ckpt.ArrayFormat(compression="blosc"),
    "bfloat16": ckpt.ArrayFormat(dtype="bfloat16"),
    "bfloat16 and zstd": ckpt.ArrayFormat(dtype="bfloat16", compression="zstd"),
}


def measure(tree: Any, array_format: ckpt.ArrayFormat, directory: str) -> str:
    """Return blocked time, time until durable, size and restore time, as cells of a table."""
    saves, restores = [], []
    dtype = array_format.dtype or np.float32
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding), tree)
    with ckpt.sync.CheckpointManager(directory, formats={"**": array_format}) as manager:
        for step in range(SAVES + 1):
            began = time.perf_counter()
            commit = manager.save(step, tree)
            returned = time.perf_counter()
            commit.result()
            saves.append((returned - began, time.perf_counter() - began))
            # The memory is warmed in the pause after a save.
            time.sleep(0.3)
            if step < SAVES:
                manager.delete(step)
        for _ in range(RESTORES):
            began = time.perf_counter()
            found = jax.block_until_ready(manager.restore(like=like))
            restores.append(time.perf_counter() - began)
            del found
        top = f"{directory}/{SAVES}"
        size = sum(
            os.path.getsize(f"{at}/{name}") for at, _, names in os.walk(top) for name in names
        )
    blocked = 1e3 * min(blocked for blocked, _ in saves[1:])
    durable = min(durable for _, durable in saves[1:])
    return f"{blocked:.0f} ms | {durable:.2f} s | {size / MIB:.0f} MiB | {min(restores):.2f} s"


def main() -> None:
    top = sys.argv[1] if len(sys.argv) > 1 else None
    print("| values | format | blocked | durable | size | restore |\n|---|---|---|---|---|---|")
    for kind, make in VALUES.items():
        random = np.random.default_rng(0)
        tree = {
            f"w{n}": jnp.asarray(make(random, 4 * MIB)).reshape(-1, 1024) for n in range(LEAVES)
        }
        for name, array_format in FORMATS.items():
            directory = tempfile.mkdtemp(dir=top)
            try:
                cells = measure(jax.block_until_ready(tree), array_format, directory)
            finally:
                shutil.rmtree(directory)
            print(f"| {kind} | {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
