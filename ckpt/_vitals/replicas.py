"""Replicas: chunks of an array that several devices hold, which should be equal. Pure.

Each process reports the fingerprints of its chunks that have replicas; they are compared before a
step is published.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# Copy of a chunk in a process: leaf, number of the chunk, and fingerprint. If the devices of the
# process do not agree, there is one record for each fingerprint.
COPY = np.dtype(
    [("process", "<u4"), ("leaf", "<u4"), ("number", "<u4"), ("fingerprint", "<u4", (2,))]
)


def no_copies() -> Array:
    return np.zeros(0, COPY)


def unequal_leaves(copies: Array) -> dict[int, tuple[int, ...]]:
    """Return the leaves whose replicas differ, by number, each with processes that have others.

    These are the processes with another fingerprint than most; if no fingerprint has the most
    holders, all of them.
    """
    keys = copies["leaf"].astype(np.uint64) << np.uint64(32) | copies["number"]
    words, processes = copies["fingerprint"].astype(np.uint64), copies["process"]
    prints = words[:, 1] << np.uint64(32) | words[:, 0]
    order = np.lexsort((prints, keys))
    keys, prints, processes = keys[order], prints[order], processes[order]
    # Chunks with several fingerprints: two neighbours of one chunk that differ.
    differ = (keys[1:] == keys[:-1]) & (prints[1:] != prints[:-1])
    found: dict[int, set[int]] = {}
    for key in np.unique(keys[1:][differ]).tolist():
        start, stop = np.searchsorted(keys, (key, key + 1))
        values, counts = np.unique(prints[start:stop], return_counts=True)
        most = values[counts == counts.max()]
        is_other = prints[start:stop] != most[0] if len(most) == 1 else np.ones(stop - start, bool)
        found.setdefault(key >> 32, set()).update(processes[start:stop][is_other].tolist())
    return {leaf: tuple(sorted(each)) for leaf, each in sorted(found.items())}
