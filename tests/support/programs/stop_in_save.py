"""Programs that are stopped by a signal in a save: `stop_in_save.py SCENARIO ROOT`.

Each says `reached` when the signal may come, and then shows what it has seen.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

import numpy as np

import ckpt
import ckpt.sync
from tests.support.odd_items import Odd, OddHandler
from tests.support.still_thread import wait_until_main_is_still

scenario, root = sys.argv[1:]
STATE = {"w": np.arange(1 << 18)}
CODE = 3


def show(found: Any) -> None:
    os.write(1, f"{json.dumps(found)}\n".encode())


def say_when_still(item: Odd) -> None:
    """Say `reached` once the save stands, and the main thread waits for it."""

    def watch() -> None:
        item.reached.wait()
        wait_until_main_is_still()
        os.write(1, b"reached\n")

    threading.Thread(target=watch, daemon=True).start()


def manager() -> ckpt.sync.CheckpointManager:
    return ckpt.sync.CheckpointManager(root, handlers=[OddHandler()])


def default() -> None:
    """Be terminated by the default action."""
    with manager() as mgr:
        mgr.save(0, STATE).result()
        item = Odd(STATE, hold="commit")
        commit = mgr.save(1, item)
        say_when_still(item)
        commit.result()


def exits_in_the_wait() -> None:
    """Raise SystemExit in the handler, while a commit is waited for."""
    gate = threading.Event()

    def stop(*_: object) -> None:
        gate.set()
        sys.exit(CODE)

    signal.signal(signal.SIGTERM, stop)
    with manager() as mgr:
        mgr.save(0, STATE).result()
        item = Odd(STATE, gate=gate)
        commit = mgr.save(1, item)
        say_when_still(item)
        commit.result()


def exits_in_the_save() -> None:
    """The same while `save` waits, so that nothing is promised yet."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(CODE))
    with manager() as mgr:
        mgr.save(0, STATE).result()
        item = Odd(STATE, hold="stage")
        say_when_still(item)
        mgr.save(1, item)


def exits_without_a_block() -> None:
    """The same with a manager that nobody closes."""
    gate = threading.Event()

    def stop(*_: object) -> None:
        gate.set()
        sys.exit(CODE)

    signal.signal(signal.SIGTERM, stop)
    mgr = manager()
    mgr.save(0, STATE).result()
    item = Odd(STATE, gate=gate)
    commit = mgr.save(1, item)
    say_when_still(item)
    commit.result()


def saves_a_last_step() -> None:
    """Set an event in the handler; the loop sees it, and saves."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with manager() as mgr:
        step = 0
        while not stop.is_set():
            mgr.save(step, STATE)
            if step == 3:
                os.write(1, b"reached\n")
            step += 1
        mgr.save(step, {"last": step}).result()
        show(step)


def waits_again() -> None:
    """Be interrupted while a commit is waited for, and wait once more."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gate = threading.Event()
    with manager() as mgr:
        item = Odd(STATE, gate=gate)
        commit = mgr.save(0, item)
        say_when_still(item)
        try:
            commit.result()
        except KeyboardInterrupt:
            show([commit.done(), mgr.is_saving_in_progress()])
        gate.set()
        info = commit.result()
        show(None if info is None else info.step)


globals()[scenario]()
