"""Device memory to host memory the library owns, one granule at a time.

Everything here runs in worker threads. Host views are taken through `addressable_shards`, never
through a global array, whose host copy jax would keep alive on the array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ckpt.errors import CheckpointError
from ckpt.layout.leaves import DTYPES
from ckpt.layout.plan import Chunk, Granule, LeafPlan

__all__ = ["copy_granule", "view_granule", "wait_until_computed"]

Array = np.ndarray[Any, Any]


def wait_until_computed(leaves: Sequence[Any]) -> None:
    """Wait until every jax array among `leaves` has its values.

    Raises:
        CheckpointError: The computation of one of them failed.
    """
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    try:
        for array in arrays:
            array.block_until_ready()
    except Exception as error:
        raise CheckpointError(f"computing the state to save failed: {error}") from error


def copy_granule(
    granule: Granule, plans: Sequence[LeafPlan], leaves: Sequence[Any], memory: Array
) -> list[Array]:
    """Copy the chunks of `granule` into `memory` and return them, C-contiguous.

    Args:
        granule: What to copy.
        plans: The plans of all leaves of the item.
        leaves: The leaves.
        memory: `[granule.nbytes] uint8`, owned by the library.
    """
    return [
        _copy_chunk(chunk, plans[chunk.leaf], leaves[chunk.leaf], memory)
        for chunk in granule.chunks
    ]


def view_granule(granule: Granule, leaves: Sequence[Any]) -> list[Array]:
    """Return the chunks of `granule` as views of the leaves' own buffers.

    The views keep the buffers alive: their content does not change, whatever happens to the arrays.
    """
    return [_shard_view(leaves[chunk.leaf], chunk)[chunk.source.slices] for chunk in granule.chunks]


def _copy_chunk(chunk: Chunk, plan: LeafPlan, leaf: Any, memory: Array) -> Array:
    dtype = DTYPES[plan.spec.dtype or ""]
    target = memory[chunk.offset : chunk.offset + chunk.nbytes].view(dtype)
    target = target.reshape(chunk.region.shape)
    sharding = plan.spec.sharding
    if chunk.shard is None and sharding is not None and not sharding.is_fully_replicated:
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                _copy_bits(target[shard.index], np.asarray(shard.data))
    else:
        _copy_bits(target, _shard_view(leaf, chunk)[chunk.source.slices])
    return target


def _shard_view(leaf: Any, chunk: Chunk) -> Array:
    if isinstance(leaf, jax.Array):
        return np.asarray(leaf.addressable_shards[chunk.shard or 0].data)
    return np.asarray(leaf)


def _copy_bits(target: Array, source: Array) -> None:
    """Copy without looking at the values: numpy copies foreign dtypes slowly, under the GIL."""
    if target.dtype == np.bool_:
        # Any byte but 0 is true in memory; stored is what TensorStore stores, 0 or 1.
        np.not_equal(source.view(np.uint8), 0, out=target)
        return
    bits = f"u{target.dtype.itemsize}" if target.dtype.itemsize <= 8 else target.dtype
    np.copyto(target.view(bits), source.view(bits))
