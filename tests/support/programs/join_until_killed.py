"""The agent of one part: `join_until_killed.py NEAR FAR PROCESS COUNT`.

It joins all steps of NEAR with those of the other agents at FAR, slowly, and ends.
Prints `begun` and `ended N OUTCOME`.
"""

from __future__ import annotations

import os
import sys

import anyio

from ckpt._tiers.drains import join_notes
from ckpt._tiers.drains.drain import DrainResult
from ckpt._tiers.drains.drainer import DrainRoute, draining
from ckpt._tiers.drains.leader import transfer_of
from ckpt.storage._resolve import open_root

near, far = sys.argv[1:3]
process, count = map(int, sys.argv[3:])
# A part takes half a second, and what is gone is noticed soon.
BYTES_PER_SECOND = 8e6
join_notes.FIRST_PAUSE_SECONDS, join_notes.LONGEST_PAUSE_SECONDS = 0.01, 0.05
join_notes.SIGN_SECONDS, join_notes.STALE_SECONDS, join_notes.LOOK_SECONDS = 0.1, 1.0, 0.5


def say(line: str) -> None:
    # One system call: a line is there whole or not at all.
    os.write(1, f"{line}\n".encode())


def told(drained: DrainResult) -> None:
    say(f"ended {drained.step} {drained.outcome}")


async def main() -> None:
    route = DrainRoute(open_root(near), open_root(far))
    strategy = transfer_of(process, count)
    async with draining(
        route, told, bytes_per_second=BYTES_PER_SECOND, strategy=strategy
    ) as drainer:
        say("begun")
        for name in os.listdir(near):
            if name.isdigit():
                await drainer.request(int(name))
        await drainer.finish()


anyio.run(main)
