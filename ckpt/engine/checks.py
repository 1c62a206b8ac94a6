"""Whether bytes that were read are those that were saved."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckpt.errors import CorruptCheckpointError
from ckpt.manifest import LeafEntry, digest

__all__ = ["check_chunk", "compare_digest"]


def check_chunk(entry: LeafEntry, number: int, array: np.ndarray[Any, Any]) -> None:
    """Check the elements of chunk `number` of a leaf, C-contiguous in `array`.

    Raises:
        CorruptCheckpointError: They are not what was saved; names the leaf.
    """
    compare_digest(entry, number, digest(array.reshape(-1).view(np.uint8).data))


def compare_digest(entry: LeafEntry, number: int, found: str) -> None:
    """Check the digest of chunk `number` of a leaf; raises as `check_chunk`."""
    if found != entry.digests[number]:
        raise CorruptCheckpointError(
            f"chunk {number} of {len(entry.digests)} is not what was saved: its digest is {found}, "
            f"the manifest says {entry.digests[number]:.32}. The data was damaged or is missing; "
            "restore another step",
            leaf=entry.name,
        )
