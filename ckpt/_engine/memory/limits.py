"""Memory limits: a check that the arrays to restore fit into the memory of this machine."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import jax

from ckpt._format.dtypes import parse_dtype
from ckpt._format.leaf_table import LeafEntry
from ckpt._plan.targets import ArrayRead, ArrayTarget
from ckpt._settings import host_memory_bytes
from ckpt.errors import InvalidArgumentError


def check_memory(reads: Sequence[ArrayRead], leaves: Sequence[LeafEntry]) -> None:
    """Refuse arrays that do not fit, before any memory is taken.

    The sizes come from a file, and the system promises more memory than it has: it kills the
    process only when the memory is used.

    Raises:
        InvalidArgumentError: The arrays take more host memory than there is.
    """
    available = host_memory_bytes()
    # Counted by shape, of which thousands of arrays have a few.
    counts = Counter((read.shape, read.stored) for read in reads)
    everything = sum(
        count * math.prod(shape) * parse_dtype(stored).itemsize
        for (shape, stored), count in counts.items()
    )
    if everything <= available:
        return
    # For devices with memory of their own a host buffer is temporary. Of a sharded array, only the
    # part of this process counts.
    sizes = [(_local_bytes(read), read) for read in reads if _stays_on_host(read.target)]
    needed = sum(size for size, _ in sizes)
    if needed > available:
        size, read = max(sizes, key=lambda each: each[0])
        raise InvalidArgumentError(
            f"the arrays take {needed} bytes of host memory, and this machine has {available}; the "
            f"largest takes {size}. Restore a part of them (like= with ... for the others), or "
            "restore in more processes",
            leaf=read.path or (None if read.leaf is None else leaves[read.leaf].name),
        )


def _stays_on_host(target: ArrayTarget) -> bool:
    if target.kind in ("jax", "key") and target.sharding is None:
        return jax.default_backend() == "cpu"
    devices = getattr(target.sharding, "addressable_devices", ())
    return all(device.platform == "cpu" for device in devices)


def _local_bytes(read: ArrayRead) -> int:
    return sum(region.size for region in read.regions) * parse_dtype(read.stored).itemsize
