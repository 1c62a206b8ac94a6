"""What the machine gives without any library: no restore can be expected to be faster.

`memcpy` copies the bytes of the state into host memory that was touched before, on one thread.
`device_put` reads the same bytes from one file in the page cache into such memory, and puts the
whole list of arrays onto the devices in one call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from benchmarks.files import read_all, split, write_all
from benchmarks.rounds import timed
from benchmarks.trees import abstract, size_bytes

if TYPE_CHECKING:
    from pathlib import Path

PyTree = Any

MEMCPY, DEVICE_PUT = "memcpy", "device_put"
NAMES = (MEMCPY, DEVICE_PUT)


class Floors:
    """Keeps one warm buffer and one file of the state's bytes."""

    def __init__(self, tree: PyTree, directory: Path) -> None:
        """Take the bytes of `tree`; its file goes to `directory`."""
        self._leaves = jax.tree.leaves(abstract(tree))
        # Zeros would be mapped, not touched.
        self._source = np.full(size_bytes(tree), 1, np.uint8)
        self._buffer = np.full(size_bytes(tree), 2, np.uint8)
        directory.mkdir(parents=True, exist_ok=True)
        self._file = directory / "floor"
        for leaf, view in zip(jax.tree.leaves(tree), self._views(self._source), strict=True):
            np.copyto(view, np.asarray(leaf))
        write_all(self._file, [self._source])

    def _views(self, memory: np.ndarray) -> list[np.ndarray]:
        return split(memory, self._leaves)

    def measure(self) -> dict[str, dict[str, float]]:
        """Returns the seconds of one round, by floor and measure."""
        copied, _ = timed(lambda: np.copyto(self._buffer, self._source))
        read, _ = timed(lambda: read_all(self._file, self._buffer.data))
        put, _ = timed(self._put)
        return {
            MEMCPY: {"restore": copied},
            DEVICE_PUT: {"restore": read + put, "read": read, "put": put},
        }

    def _put(self) -> None:
        placement: Any = [leaf.sharding for leaf in self._leaves]
        if len(set(placement)) == 1:
            placement = placement[0]
        # may_alias would let the arrays share the buffer that the next round overwrites.
        jax.block_until_ready(jax.device_put(self._views(self._buffer), placement, may_alias=False))
