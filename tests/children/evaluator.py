"""Is handed steps: `evaluator.py HOW ROOT LEASE`. Prints `step N`, then does as HOW says.

`waits` waits for a line of its input before the next step; `blocks` holds the interpreter's main
thread until then; `leaves` ends with the watch open.
"""

from __future__ import annotations

import os
import sys

import ckpt
import ckpt.sync

how, root, lease = sys.argv[1], sys.argv[2], float(sys.argv[3])
KEPT = ckpt.sync.watch(root, timeouts=ckpt.Timeouts(lease=lease), poll_interval=0.05)
for info in KEPT:
    os.write(1, f"step {info.step}\n".encode())
    if how == "leaves":
        break
    if not sys.stdin.readline():
        break
os.write(1, b"end\n")
