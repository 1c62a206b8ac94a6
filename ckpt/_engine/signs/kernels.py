"""Compiled kernels of vital signs, for the layouts that arrays have on devices."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from msgspec import Struct, field

from ckpt._engine.signs.shard_kernel import chunk_sums
from ckpt._runtime.threads import run_in_thread

logger = logging.getLogger("ckpt")

# Most memory that a kernel may need for itself: this part of a shard's memory, and a little.
_SCRATCH_SHARE, _SCRATCH_BYTES = 8, 4 << 20
_AXIS = "shards"


class KernelKey(Struct, frozen=True):
    """The properties that a kernel is compiled for.

    Attributes:
        devices: The devices of the shards, in the order of the shards.
        shard: Shape of a shard.
        dtype: Name of the dtype.
        chunk: Shape of a chunk, which must be consecutive memory of a shard; see `is_run`.
        offsets: The first corner of each shard in its array.
    """

    devices: tuple[Any, ...]
    shard: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    offsets: tuple[tuple[int, ...], ...]

    def sharding(self) -> jax.sharding.NamedSharding:
        """Return the sharding of the shards as one array: side by side along its first axis."""
        return _side_by_side(self.devices)

    def shape(self) -> tuple[int, ...]:
        """Return the shape of the shards as one array."""
        first, *others = self.shard
        return (first * len(self.devices), *others)


class Kernels(Struct):
    """The compiled kernels of a manager. Used by one save at a time.

    A kernel is a function of an array whose first axis is divided over devices, so that each has
    its shard. It returns the results of `chunk_sums` for all devices: `[devices, chunks, n]`.

    Attributes:
        wanted: Kernels that a save could have used, and that are to be compiled after it.
    """

    _known: dict[KernelKey, Any] = field(default_factory=dict)
    wanted: dict[KernelKey, None] = field(default_factory=dict)
    _compiling: bool = False

    def find(self, key: KernelKey) -> Any | None:
        """Return a kernel; None if it is not compiled."""
        return self._known.get(key)

    def give_up(self, key: KernelKey) -> None:
        """Never use a kernel again, since it cannot run on the arrays that it was made for."""
        self._known[key] = None

    def missing(self, keys: Iterable[KernelKey]) -> list[KernelKey]:
        """Return the keys that were never compiled."""
        return [key for key in dict.fromkeys(keys) if key not in self._known]

    async def compile_wanted(self, goes_on: Callable[[], bool]) -> None:
        """Compile kernels that saves wanted, while `goes_on` returns True; on the engine's loop.

        Returns at once if another call is doing this already.
        """
        if self._compiling:
            return
        self._compiling = True
        try:
            while self.wanted and goes_on():
                # Removed only when compiled, so that a save meanwhile does not want it again.
                key = next(iter(self.wanted))
                await run_in_thread(self.compile, key)
                del self.wanted[key]
        finally:
            self._compiling = False

    def compile(self, key: KernelKey) -> None:
        """Compile a kernel, which takes some tenths of a second. If that fails, there is none."""
        if key in self._known:
            return
        kernel = None
        try:
            kernel = _compiled(key)
        except Exception as error:
            logger.warning(
                "no kernel of vital signs for %s%s on %s: they are taken on the host (%s)",
                key.dtype,
                list(key.shard),
                key.devices[0],
                error,
            )
        self._known[key] = kernel


@functools.lru_cache(maxsize=64)
def _side_by_side(devices: tuple[Any, ...]) -> jax.sharding.NamedSharding:
    mesh = jax.sharding.Mesh(np.array(devices), (_AXIS,))
    spec = jax.sharding.PartitionSpec(_AXIS)  # type: ignore[no-untyped-call]
    return jax.sharding.NamedSharding(mesh, spec)


def _compiled(key: KernelKey) -> Any | None:
    """Return a compiled kernel; None if it would use much memory of its own."""
    sharding = key.sharding()

    def sums(shard: jax.Array) -> tuple[jax.Array, jax.Array]:
        offset = jnp.array(key.offsets, jnp.uint32)[lax.axis_index(_AXIS)]
        return chunk_sums(shard, offset, key.chunk)

    mapped = jax.shard_map(
        sums,
        mesh=sharding.mesh,
        in_specs=sharding.spec,
        out_specs=(sharding.spec, sharding.spec),
    )
    shards = jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
        key.shape(), jnp.dtype(key.dtype), sharding=sharding
    )
    kernel = jax.jit(mapped).lower(shards).compile()
    memory = kernel.memory_analysis()
    nbytes = shards.dtype.itemsize * math.prod(key.shard)
    # Not all backends report their memory.
    scratch = 0 if memory is None else memory.temp_size_in_bytes
    return kernel if scratch <= nbytes // _SCRATCH_SHARE + _SCRATCH_BYTES else None
