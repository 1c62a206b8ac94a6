"""Uses the library in a thread after the main thread has ended: `use_after_main.py USE ROOT`.

Prints what came of it.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import ckpt
import ckpt.sync

STATE = {"w": np.arange(8.0)}


def uses(root: Path) -> dict[str, Callable[[], Any]]:
    """Return what is done in the thread by name; what it needs from before is made now."""
    unused, used = ckpt.sync.CheckpointManager(root), ckpt.sync.CheckpointManager(root)
    in_tasks = ckpt.CheckpointManager(root)
    used.save(0, STATE).result()

    async def save() -> None:
        await (await in_tasks.save(1, STATE))

    def one_shot() -> None:
        ckpt.sync.save(root / "one", STATE)
        ckpt.sync.load(root / "one")

    return {
        "first": lambda: unused.save(1, STATE).result(),
        "again": lambda: used.save(1, STATE).result(),
        "in tasks": lambda: asyncio.run(save()),
        "new": lambda: ckpt.sync.CheckpointManager(root).all_steps(),
        "watch": lambda: next(iter(ckpt.sync.watch(root))),
        "one-shot": one_shot,
    }


def main(use: str, root: str) -> None:
    if use == "only":
        # Nothing of the library was used before.
        call: Callable[[], Any] = lambda: ckpt.sync.CheckpointManager(root)  # noqa: E731
    else:
        call = uses(Path(root))[use]

    def late() -> None:
        threading.main_thread().join()
        try:
            call()
        except Exception as error:
            sys.stdout.write(f"{type(error).__name__}: {error}\n")
        else:
            sys.stdout.write("done\n")
        sys.stdout.flush()

    threading.Thread(target=late).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
