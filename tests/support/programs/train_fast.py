"""Saves as fast as it can and keeps one step: `train_fast.py ROOT`, until its input ends.

Every third version overwrites the step before it. The metadata of a step is its version.
"""

from __future__ import annotations

import os
import sys
import threading

import ckpt
import ckpt.sync
from tests.support.numbered_states import state_of

stop = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
states = [state_of(number, large=1 << 16) for number in range(8)]
with ckpt.sync.CheckpointManager(sys.argv[1], keep=ckpt.keep.Latest(1)) as mgr:
    version = step = 0
    while not stop.is_set():
        again = version % 3 == 2
        step += not again
        mgr.save(
            step,
            states[version % 8],
            custom_metadata=version,
            if_exists="replace" if again else "error",
        ).result()
        if version == 0:
            os.write(1, b"ready\n")
        version += 1
    os.write(1, f"{version}\n".encode())
