"""Keeps the two latest of a root: `keep_two_steps.py ROOT FIRST STRIDE COUNT`; prints `ack N`.

Starts when it is told to, so that several begin together.
"""

from __future__ import annotations

import os
import sys

import numpy as np

import ckpt
import ckpt.sync

root, first, stride, count = sys.argv[1], *map(int, sys.argv[2:])
with ckpt.sync.CheckpointManager(root, keep=ckpt.keep.Latest(2)) as mgr:
    os.write(1, b"ready\n")
    sys.stdin.readline()
    for step in range(first, first + stride * count, stride):
        mgr.save(step, {"w": np.full(1 << 16, step, np.int64), "small": np.arange(step)}).result()
        os.write(1, f"ack {step}\n".encode())
    mgr.wait_until_finished()
    os.write(1, b"end\n")
