"""Takes snapshots in memory: `take_snapshots.py ROOT DIRECTORY THEN [FIRST COUNT [OPTION...]]`.

Prints `start N` with the step that `resume` gave, and `ack N` once the snapshot of step N is whole.
THEN is what it does after COUNT of them:

    wait      until its input ends, and then ends well
    raise     raises an error out of the block of the manager
    exit      ends without closing the manager
    die       kills itself
    hold      prints `held` and sits in a call of C that holds the interpreter
    compile   prints `held` and compiles for about 20 s
    go on     takes snapshots until it is killed

Options: `handled` (SIGTERM has a handler), `loop` (a loop of asyncio hears of it, too), `preempt`
(it is one of the `preemption_signals`), `keep` (nothing is flushed).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import sys
from typing import Any

import jax
import jax.numpy as jnp

import ckpt
import ckpt.sync
from tests.support.numbered_states import state_of

root, directory, then, *rest = sys.argv[1:]
first, count = (int(rest[0]), int(rest[1])) if rest else (-1, 2)
options = rest[2:]
logging.basicConfig(level=logging.INFO, format="%(message)s")


def say(text: str) -> None:
    # One system call: a line is there whole or not at all.
    os.write(1, f"{text}\n".encode())


def slow(x: Any) -> Any:
    for _ in range(2300):
        x = jnp.sort(jnp.sin(x @ x.T).ravel())[: x.size].reshape(x.shape)
    return x


def act() -> None:
    if then == "wait":
        sys.stdin.read()
    elif then == "raise":
        raise ValueError("the training has failed")
    elif then == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif then == "hold":
        say("held")
        # One call, which keeps the interpreter's lock: neither handlers nor threads run meanwhile.
        sum(itertools.repeat(1, 10**11))
        say("released")
    elif then == "compile":
        lowered = jax.jit(slow).lower(jnp.ones((8, 8)))
        say("held")
        lowered.compile()
        say("released")


def train() -> None:
    memory = ckpt.tiers.SharedMemory(directory=directory, flush="keep" not in options)
    signals = (signal.SIGTERM,) if "preempt" in options else ()
    mgr = ckpt.sync.CheckpointManager(
        root,
        tiers=[memory],
        save_when=ckpt.save_when.Any(
            ckpt.save_when.EverySteps(1), ckpt.save_when.Preempted(signals)
        ),
    )
    if then == "exit":
        take(mgr)
        return
    with mgr:
        take(mgr)
        act()


def take(mgr: ckpt.sync.CheckpointManager) -> None:
    start, _ = mgr.resume(lambda: state_of(0))
    say(f"start {start}")
    begin = start if first < 0 else first
    for step in itertools.count(begin) if then == "go on" else range(begin, begin + count):
        mgr.snapshot(step, state_of(step)).result()
        say(f"ack {step}")


if "handled" in options:
    signal.signal(signal.SIGTERM, lambda *_: say("handled"))


async def in_loop() -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: say("heard by the loop"))
    train()
    # The loop hears of it when the call of C has ended.
    await asyncio.sleep(0.5)


if "loop" in options:
    asyncio.run(in_loop())
else:
    train()
