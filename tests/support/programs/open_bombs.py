"""Open every checkpoint below a directory with little memory to spare: `open_bombs.py ROOT LIMIT`.

Each call prints a line of JSON: the checkpoint, the call, what came of it, the seconds and the
bytes of memory it took. `LIMIT` are the bytes of address space beyond what a sound load takes.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ckpt
import ckpt.sync
from ckpt._engine.verify.report import VerifyReport

logging.disable()


def memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(name)


def attempt(call: Callable[[], Any]) -> str:
    try:
        found = call()
        if isinstance(found, VerifyReport):
            return "sound" if found.ok else f"problems: {found.problems[0].message:.300}"
    except ckpt.CheckpointError as error:
        return f"refused: {error!s:.300}"
    except Exception as error:
        return f"{type(error).__name__}: {error!s:.300}"
    return "believed"


root, limit = Path(sys.argv[1]), int(sys.argv[2])
# What the first load imports and starts is not of the bombs.
assert attempt(lambda: ckpt.sync.load(root / "sound")) == "believed"
for path in sorted(root.iterdir()):
    # To verify what is large takes long, and is what was asked for.
    calls: dict[str, Callable[[], Any]] = {
        "metadata": partial(ckpt.sync.metadata, path),
        "load": partial(ckpt.sync.load, path),
        "verify": partial(ckpt.sync.verify, path, deep=False),
    }
    for name, call in calls.items():
        gc.collect()
        # From call to call the process keeps address space that nothing lies in.
        space = memory("VmSize") + limit
        resource.setrlimit(resource.RLIMIT_AS, (space, resource.RLIM_INFINITY))
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        began = time.monotonic()
        found = attempt(call)
        took, more = time.monotonic() - began, memory("VmHWM") - before
        line = json.dumps([path.name, name, found, round(took, 2), more])
        os.write(1, f"{line}\n".encode())
