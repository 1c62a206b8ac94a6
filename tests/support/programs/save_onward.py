"""Saves one step after the other and keeps the latest: `save_onward.py ROOT COUNT`.

Prints `ack N` for each, and `end` when the steps that are not kept have been deleted.
"""

from __future__ import annotations

import os
import sys

import numpy as np

import ckpt
import ckpt.sync

root, count = sys.argv[1], int(sys.argv[2])
with ckpt.sync.CheckpointManager(root, keep=ckpt.keep.Latest(1)) as mgr:
    for step in range(count):
        mgr.save(step, {"w": np.full(1 << 14, step, np.int64)}).result()
        os.write(1, f"ack {step}\n".encode())
    mgr.wait_until_finished()
    os.write(1, b"end\n")
