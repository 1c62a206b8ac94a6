"""Ends while it saves: `save_while_ending.py ROOT`; prints what was imported meanwhile."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Sequence

import numpy as np

import ckpt.sync

ended = threading.Event()
late: list[str] = []


class Finder:
    """Notes the modules of the library that are imported after the last line of the program."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> None:
        if ended.is_set() and name.startswith("ckpt"):
            late.append(name)


def wait(event: ckpt.types.Event) -> None:
    """Hold the save until the program has ended."""
    if event.phase == "write":
        ended.wait(60)


sys.meta_path.insert(0, Finder())
atexit.register(lambda: sys.stdout.write(f"{late}\n"))
mgr = ckpt.sync.CheckpointManager(
    sys.argv[1],
    keep=1,
    trash="trash",
    observers=[wait],
    formats={"**": ckpt.ArrayFormat(compression=ckpt.Zstd())},
)
mgr.save(2, {"w": np.arange(1e5)})
ended.set()
