"""The process in which `ckpt bench` saves, and the processes in which it restores.

A process gets its work on its input, one step at a time, and answers with a line of JSON.
"""

from __future__ import annotations

import json
import mmap
import sys
import time
from collections.abc import Callable
from typing import Any

_LEAVES = 16
_ITEM_BYTES = 4


def main() -> None:
    """Save or restore as the arguments say: the work, the root, and the bytes of the state."""
    what, root, nbytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
    try:
        work = {"save": _saves, "restore": _restores}[what](root, nbytes // _LEAVES // _ITEM_BYTES)
        for line in sys.stdin:
            _answer(work(int(line)))
    except Exception as error:
        _answer({"error": f"{type(error).__name__}: {error}"})


def _answer(record: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def _saves(root: str, length: int) -> Callable[[int], dict[str, float]]:
    import jax

    import ckpt.sync

    mgr = ckpt.sync.CheckpointManager(root)
    key = jax.random.key(0)
    kept: list[Any] = [
        {
            f"w{number:02d}": jax.random.uniform(jax.random.fold_in(key, number), (length,))
            for number in range(_LEAVES)
        }
    ]
    # Every save has other bytes in the same memory.
    change = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)

    def save(step: int) -> dict[str, float]:
        if step < 0:
            mgr.delete(-step)
            return {}
        kept[0] = jax.block_until_ready(change(kept[0]))  # type: ignore[no-untyped-call]
        began = time.perf_counter()
        commit = mgr.save(step, kept[0])
        blocked = time.perf_counter() - began
        commit.result()
        return {"blocked": blocked, "save": time.perf_counter() - began}

    return save


def _restores(root: str, length: int) -> Callable[[int], dict[str, float]]:
    import jax
    import jax.numpy as jnp

    import ckpt.sync

    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shape = jax.ShapeDtypeStruct((length,), jnp.float32, sharding=place)  # type: ignore[no-untyped-call]
    like = {f"w{number:02d}": shape for number in range(_LEAVES)}

    _touch_memory(length * _LEAVES * _ITEM_BYTES)

    def restore(step: int) -> dict[str, float]:
        began = time.perf_counter()
        with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
            jax.block_until_ready(mgr.restore(step, like))  # type: ignore[no-untyped-call]
            return {"restore": time.perf_counter() - began}

    return restore


def _touch_memory(nbytes: int) -> None:
    """Touch memory and give it back.

    Memory that a virtual machine has returned to its host is several times slower to touch than
    memory that was used a moment ago. That delay says nothing about the restore.
    """
    with mmap.mmap(-1, nbytes) as region:
        region[:: mmap.PAGESIZE] = bytes(len(range(0, nbytes, mmap.PAGESIZE)))


if __name__ == "__main__":
    main()
