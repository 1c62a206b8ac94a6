"""Saves once it may start no more threads: `save_without_threads.py`; prints what came of it."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import threading

import numpy as np

import ckpt.sync
from ckpt.errors import CheckpointError

STATE = {"w": np.arange(100_000.0)}


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        # What is imported at first use is there now.
        ckpt.sync.save(f"{root}/one", STATE)
    if os.geteuid() == 0:
        # The limit does not hold for root.
        os.setuid(65534)
    with tempfile.TemporaryDirectory() as root:
        # What starts threads of its own at first use has them now.
        ckpt.sync.save(f"{root}/one", STATE)
        before = resource.getrlimit(resource.RLIMIT_NPROC)
        resource.setrlimit(resource.RLIMIT_NPROC, (1, before[1]))
        try:
            threading.Thread(target=str).start()
        except RuntimeError:
            pass
        else:
            sys.stdout.write("no limit\n")
            return
        try:
            ckpt.sync.save(f"{root}/two", STATE)
        except CheckpointError as error:
            sys.stdout.write(f"{type(error).__name__} {error.errno}: {error}\n")  # type: ignore[attr-defined]
        resource.setrlimit(resource.RLIMIT_NPROC, before)
        ckpt.sync.save(f"{root}/two", STATE)
        sys.stdout.write(f"{sorted(os.listdir(root))}\n")


if __name__ == "__main__":
    main()
