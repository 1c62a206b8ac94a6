"""A training loop whose disk becomes full: `train_on_small_disk.py ROOT STEPS QUOTA_BYTES`.

No file may grow beyond the quota from step 2 on (0: only the disk itself is small). It looks at no
commit. Prints what each call of `save` came to: the step, or the error. With "end" as a fourth
argument it ends after step 2 without closing the manager.
"""

from __future__ import annotations

import resource
import signal
import sys

import numpy as np

import ckpt
import ckpt.sync


def main(root: str, steps: int, quota: int, end: bool) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    mgr = ckpt.sync.CheckpointManager(root)
    for step in range(steps):
        if step == 2 and quota:
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (quota, limit))
        try:
            commit = mgr.save(step, {"w": np.random.default_rng(step).random(1 << 18)})
        except ckpt.CheckpointError as error:
            print(f"{step}: {type(error).__name__}: {error}", flush=True)  # noqa: T201
            break
        print(f"{step}: called", flush=True)  # noqa: T201
        while not commit.done():
            # A train step.
            pass
        if end and step == 2:
            return
    mgr.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:] == ["end"])
