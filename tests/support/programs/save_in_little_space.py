"""Saves and loads where the address space is limited: `save_in_little_space.py ROOT`.

Prints what came of each call as a line.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import ckpt
import ckpt.sync

LARGE_BYTES = 512 << 20
STATE = {"w": np.arange(100_000.0)}


def limit(left: int) -> None:
    """Leave this process so many more bytes of address space."""
    # The memory of the saves before: it would come back after the limit is set.
    gc.collect()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + left, resource.RLIM_INFINITY))


def attempt(call: Callable[[], object]) -> None:
    try:
        call()
    except ckpt.CheckpointError as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
    else:
        sys.stdout.write("done\n")


def main(root: str) -> None:
    # What reserves address space at first use has it now.
    ckpt.sync.save(f"{root}/one", STATE)
    large = {"w": np.zeros(LARGE_BYTES, np.uint8)}
    ckpt.sync.save(f"{root}/large", large, staging=ckpt.Staging(budget_bytes=64 << 20))
    del large
    budget = ckpt.Staging().effective_budget
    limit(min(budget, 2 << 30))
    attempt(lambda: ckpt.sync.save(f"{root}/two", STATE))
    attempt(lambda: ckpt.sync.load(f"{root}/two"))
    more = ckpt.Staging(budget_bytes=4 << 30)
    attempt(lambda: ckpt.sync.save(f"{root}/three", STATE, staging=more))
    limit(LARGE_BYTES // 2)
    attempt(lambda: ckpt.sync.load(f"{root}/large"))


if __name__ == "__main__":
    main(*sys.argv[1:])
