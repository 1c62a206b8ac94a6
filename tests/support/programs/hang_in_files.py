"""Ends while an operation of the file system hangs: `hang_in_files.py OPERATION ROOT`."""

from __future__ import annotations

import sys
import threading

import numpy as np

import ckpt
import ckpt.sync
from ckpt.storage._local import posix

EXIT_SECONDS = 0.5


def main(operation: str, root: str) -> None:
    mgr = ckpt.sync.CheckpointManager(root, timeouts=ckpt.Timeouts(exit=EXIT_SECONDS))
    mgr.save(1, {"a": np.zeros(10)}).result()
    hangs, original = threading.Event(), getattr(posix, operation)

    def hang(*_: object, **__: object) -> None:
        hangs.set()
        threading.Event().wait()

    for name, module in list(sys.modules.items()):
        if name.startswith("ckpt.storage") and vars(module).get(operation) is original:
            setattr(module, operation, hang)
    call = {"read_regular": lambda: mgr.metadata(1), "rename_new": lambda: mgr.save(2, {"a": 1})}
    threading.Thread(target=call[operation], daemon=True).start()
    assert hangs.wait(60)
    sys.stdout.write("ends\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
