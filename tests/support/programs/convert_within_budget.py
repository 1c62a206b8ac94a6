"""Converts 512 MiB with a budget of 128, and tells how far memory grew: `... FOLDER FORMAT`."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

import ckpt
import ckpt.sync
from tests.support.real_jobs import tell

MIB = 1 << 20
folder, kind = Path(sys.argv[1]), sys.argv[2]
shape = (2048, 2048)


def value(number: int) -> Any:
    return np.full(shape, number, np.float32)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


with ckpt.sync.CheckpointManager(folder, staging=ckpt.Staging(64 * MIB)) as mgr:
    for step in (1, 2):
        with mgr.partial(step) as part:
            for number in range(32):
                part.save({f"w{number:02}": value(number)})
# Everything that is imported once, and the arena of the save, is there before.
ckpt.sync.convert(folder / "1", folder / "first")

ended = threading.Event()
before, peak = resident(), 0


def watch() -> None:
    global peak
    while not ended.wait(0.005):
        peak = max(peak, resident())


thread = threading.Thread(target=watch)
thread.start()
source: Any = folder / "1"
if kind == "merge":
    source = {folder / "1": 0.5, folder / "2": 0.5}
format: Any = "ckpt" if kind == "merge" else kind
target = folder / "converted"
ckpt.sync.convert(source, target, format=format, budget_bytes=128 * MIB)
ended.set()
thread.join()
if kind == "zarr":
    same = sum(each.stat().st_size for each in target.rglob("c/*/*")) == 512 * MIB
else:
    array = ckpt.sync.open_array(target, "w31")
    same = array.shape == shape and bool((array[-3:] == 31).all())
tell({"grown": peak - before, "same": same})
