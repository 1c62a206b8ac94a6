"""Is handed steps: `watch_steps.py HOW ROOT LEASE`. Prints `step N`, then does as HOW says.

`waits` waits for a line of its input before the next step; `leaves` ends with the watch open.
`break`, `raise` and `exit` leave the loop that way, and then end: one loop over ROOT/plain and one
over ROOT/asyncio, on a store that takes its time to remove what is to be let go.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import anyio

import ckpt
import ckpt.sync

# A background job of a shell starts with the signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
how, root, lease = sys.argv[1], sys.argv[2], float(sys.argv[3])
OPTIONS: dict[str, Any] = {"timeouts": ckpt.Timeouts(lease=lease), "poll_interval": 0.05}
SLOW_SECONDS = 0.5


def slow(watch: Any) -> Any:
    storage = watch._face.watcher._storage
    drop_note = storage.drop_note

    async def late(*args: Any, **options: Any) -> Any:
        await anyio.sleep(SLOW_SECONDS)
        return await drop_note(*args, **options)

    storage.drop_note = late
    return watch


def leave() -> None:
    if how == "raise":
        raise ValueError("the evaluation failed")
    if how == "exit":
        sys.exit(3)


def plain() -> None:
    for info in slow(ckpt.sync.watch(f"{root}/plain", **OPTIONS)):
        os.write(1, f"step {info.step}\n".encode())
        leave()
        break


async def in_asyncio() -> None:
    async for info in slow(ckpt.watch(f"{root}/asyncio", **OPTIONS)):
        os.write(1, f"step {info.step}\n".encode())
        leave()
        break


if how in ("break", "raise", "exit"):
    try:
        asyncio.run(in_asyncio())
    finally:
        plain()
else:
    KEPT = ckpt.sync.watch(root, **OPTIONS)
    for info in KEPT:
        os.write(1, f"step {info.step}\n".encode())
        if how == "leaves" or not sys.stdin.readline():
            break
    os.write(1, b"end\n")
