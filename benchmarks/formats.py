"""What formats cost and save: 512 MiB of three kinds of values in several formats.

Best of three saves after a first one, and of three restores from the page cache.
"""

from __future__ import annotations

import shutil
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

import ckpt
from benchmarks.rounds import timed_commit
from benchmarks.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

MIB = 1 << 20
LEAVES = 32
SAVES = RESTORES = 3
Array = np.ndarray[Any, Any]


def _half_zeros(random: np.random.Generator, count: int) -> Array:
    """Every other value zero, the others of few bits, as weights are that came from bfloat16."""
    values = random.standard_normal(count, np.float32)
    values[::2] = 0
    return values.astype(jnp.bfloat16).astype(np.float32)


VALUES: Mapping[str, Callable[[np.random.Generator, int], Array]] = {
    "random bits": lambda random, n: random.integers(0, 1 << 32, n, np.uint32).view(np.float32),
    "normal": lambda random, n: random.standard_normal(n, np.float32),
    "half zeros": _half_zeros,
}
FORMATS = {
    "none": ckpt.ArrayFormat(),
    "zstd, level 1": ckpt.ArrayFormat(compression=ckpt.Zstd(level=1)),
    "blosc": ckpt.ArrayFormat(compression="blosc"),
    "bfloat16": ckpt.ArrayFormat(dtype="bfloat16"),
    "bfloat16 and zstd": ckpt.ArrayFormat(dtype="bfloat16", compression="zstd"),
}


def formats(place: Path) -> str:
    """Returns what each format costs and saves for each kind of values."""
    rows = []
    for kind, make in VALUES.items():
        random = np.random.default_rng(0)
        tree = jax.block_until_ready(
            {f"w{n}": jnp.asarray(make(random, 4 * MIB)).reshape(-1, 1024) for n in range(LEAVES)}
        )
        for name, array_format in FORMATS.items():
            rows.append((kind, name, *_measured(tree, array_format, place / "run")))
            shutil.rmtree(place / "run")
    head = ("values", "format", "blocked", "durable", "size", "restore")
    return table(head, rows, align="---")


def _measured(tree: Any, array_format: ckpt.ArrayFormat, directory: Path) -> tuple[str, ...]:
    """Return blocked time, time until durable, size and restore time, as cells of a table."""
    saves, restores = [], []
    dtype = array_format.dtype or np.float32
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding), tree)
    with ckpt.sync.CheckpointManager(directory, formats={"**": array_format}) as manager:
        for step in range(SAVES + 1):
            saves.append(timed_commit(partial(manager.save, step, tree))[:2])
            # The memory is warmed in the pause after a save.
            time.sleep(0.3)
            if step < SAVES:
                manager.delete(step)
        for _ in range(RESTORES):
            began = time.perf_counter()
            found = jax.block_until_ready(manager.restore(like=like))
            restores.append(time.perf_counter() - began)
            del found
        files = (directory / str(SAVES)).rglob("*")
        size = sum(file.stat().st_size for file in files if file.is_file())
    blocked, durable = (min(each) for each in zip(*saves[1:], strict=True))
    return (
        f"{1e3 * blocked:.0f} ms",
        f"{durable:.2f} s",
        f"{size / MIB:.0f} MiB",
        f"{min(restores):.2f} s",
    )
