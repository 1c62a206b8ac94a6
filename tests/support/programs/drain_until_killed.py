"""Saves steps on one disk and drains them to another: `drain_until_killed.py NEAR FAR MODE`.

With the mode `save` it goes on until it is killed. With `finish` it drains what is missing, and
ends. Prints `saved N` once a step is durable at NEAR, and `drained N OUTCOME` of each drain.
NEAR keeps two steps, and those that wait.
"""

from __future__ import annotations

import os
import sys
from itertools import count

import anyio

import ckpt
from ckpt._tiers.drains.drain import DrainResult, missing
from ckpt._tiers.drains.drainer import DrainRoute, draining
from ckpt.storage._resolve import open_root
from tests.support.numbered_states import state_of

LARGE = 1 << 18
near, far, mode = sys.argv[1:]


def say(line: str) -> None:
    # One system call: a line is there whole or not at all.
    os.write(1, f"{line}\n".encode())


def told(drained: DrainResult) -> None:
    say(f"drained {drained.step} {drained.outcome}")


async def main() -> None:
    route = DrainRoute(open_root(near), open_root(far))
    keep = ckpt.keep.Latest(2)
    async with draining(route, told, most_waiting=1000) as drainer:
        for step in await missing(route.source, route.target):
            await drainer.request(step)
        if mode == "finish":
            await drainer.finish()
            return
        async with ckpt.CheckpointManager(near, keep=keep) as mgr:
            latest = await mgr.latest_step()
            for step in count(0 if latest is None else latest + 1):
                await mgr.save(step, state_of(step, large=LARGE), durable=True)
                say(f"saved {step}")
                await drainer.request(step)


anyio.run(main)
