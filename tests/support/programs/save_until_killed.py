"""Saves until it is killed: `save_until_killed.py ROOT MODE [SAVES [PHASE COUNT]]`.

Prints `ack N` once the step (or, to overwrite one step, the version) N is durable, or `failed N E`
with the number of the system's error. With SAVES it ends after so many. With PHASE it kills itself
when the COUNT-th event of that phase arrives.
"""

from __future__ import annotations

import os
import signal
import sys

import ckpt
import ckpt.sync
from tests.support.numbered_states import state_of

root, mode, *rest = sys.argv[1:]
saves = int(rest[0]) if rest else sys.maxsize
kill = rest[1:]
left = int(kill[1]) if kill else 0


def observe(event: ckpt.types.Event) -> None:
    global left
    if kill and event.operation == "save" and event.phase == kill[0]:
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


preservation = ckpt.keep.Latest(2) if mode == "preserve" else None
with ckpt.sync.CheckpointManager(root, keep=preservation, observers=[observe]) as mgr:
    latest = mgr.latest_step()
    first = 0
    if latest is not None:
        first = mgr.metadata(latest).info.custom_metadata + 1
    for number in range(first, first + saves):
        step = 0 if mode == "overwrite" else number
        state = state_of(number)
        try:
            mgr.save(
                step,
                state,
                custom_metadata=number,
                if_exists="replace" if mode == "overwrite" else "error",
            ).result()
            line = f"ack {number}\n"
        except ckpt.errors.StorageError as error:
            line = f"failed {number} {error.errno}\n"
        # One system call: a line is there whole or not at all.
        os.write(1, line.encode())
