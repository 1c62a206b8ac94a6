"""Saves many times in a row, and tells what it holds: `save_many_times.py ROOT SAVES`.

Every tenth save overwrites, every fiftieth is restored and compared. Prints a JSON object of what
the process has, after a warm-up of a fifth and at the end.
"""

from __future__ import annotations

import collections
import gc
import json
import os
import sys
import threading

import jax.numpy as jnp
import numpy as np

import ckpt
import ckpt.sync
from ckpt.testing.compare import differences

PAGE = os.sysconf("SC_PAGE_SIZE")
root, saves = sys.argv[1], int(sys.argv[2])


def state_of(number: int) -> dict[str, object]:
    return {"w": np.full(5000, number), "device": jnp.full(100, number), "number": number}


def tell() -> None:
    gc.collect()
    kinds = collections.Counter(
        f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects()
    )
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    found = {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "tasks": len(os.listdir("/proc/self/task")),
        "rss": pages * PAGE,
        "root": sorted(set(os.listdir(root)) - {".ckpt-run"}),
        "objects": kinds,
        "steps": mgr.all_steps(),
    }
    os.write(1, f"{json.dumps(found)}\n".encode())


with ckpt.sync.CheckpointManager(root, keep=ckpt.keep.Latest(2)) as mgr:
    step = -1
    for number in range(saves):
        again = number % 10 == 9
        step += not again
        state = state_of(number)
        mgr.save(
            step,
            state,
            custom_metadata=number,
            metrics={"n": number},
            if_exists="replace" if again else "error",
        ).result()
        if number % 50 == 49:
            assert differences(state, mgr.restore()) == []
        if number + 1 in (saves // 5, saves):
            mgr.wait_until_finished()
            del state
            tell()
