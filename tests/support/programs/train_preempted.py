"""Trainers that are told to end: `train_preempted.py SCENARIO ROOT [RANK PORT]`.

Each says `ready` when the signal may come, and shows what it has seen as one line of JSON.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp

import ckpt
import ckpt.sync
from ckpt._format.manifest import ItemEntry
from ckpt._plan.adapt import Adapt
from ckpt.handlers._base import ItemReader, ItemWriter
from ckpt.handlers._pytree import PyTreeHandler
from tests.support.odd_items import Odd, OddHandler
from tests.support.still_thread import main_frame

scenario, root, *rest = sys.argv[1:]
TERM = (signal.SIGTERM,)
SELDOM = ckpt.save_when.EverySteps(10**9)
KEPT: list[Any] = []

Tree = dict[str, Any]


@jax.jit
def train(state: Tree) -> Tree:
    return {"w": state["w"] + 1}


def fresh() -> Tree:
    return {"w": jnp.zeros(4096)}


def tell(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def show(found: Any) -> None:
    tell(json.dumps(found))


def signal_here() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@dataclass
class Signalling:
    """A tree; while it is staged, this process gets SIGTERM."""

    tree: Tree


class SignallingHandler:
    name = "signalling"

    def accepts(self, item: Any) -> bool:
        return isinstance(item, Signalling)

    async def stage(self, item: Signalling, writer: ItemWriter) -> Awaitable[ItemEntry]:
        signal_here()
        return await PyTreeHandler().stage(item.tree, writer)

    async def load(self, entry: ItemEntry, like: Any, adapt: Adapt, reader: ItemReader) -> Any:
        return await PyTreeHandler().load(entry, like, adapt, reader)


def plain(signals: tuple[signal.Signals, ...] = TERM) -> None:
    """Train until told to end; the policy wants step 0 only."""
    state = fresh()
    with ckpt.sync.CheckpointManager(
        root, save_when=ckpt.save_when.Any(SELDOM, ckpt.save_when.Preempted(signals))
    ) as mgr:
        for step in itertools.count():
            state = train(state)
            mgr.save(step, state)
            if step == 3:
                tell("ready")
            if mgr.reached_preemption(step):
                break
    show(step)


def in_asyncio() -> None:
    """The same; the signal finds the trainer in an await of its own, in most cases."""

    async def main() -> int:
        state = fresh()
        options: Tree = {"save_when": ckpt.save_when.Any(SELDOM, ckpt.save_when.Preempted())}
        async with ckpt.CheckpointManager(root, **options) as mgr:
            for step in itertools.count():
                state = train(state)
                await asyncio.sleep(0)
                await mgr.save(step, state)
                if step == 3:
                    tell("ready")
                if mgr.reached_preemption(step):
                    return step
        raise AssertionError

    show(asyncio.run(main()))


def in_an_await(root: Path) -> list[bool]:
    """Get the signal while the loop waits for the step's batch."""

    async def main() -> list[bool]:
        async with ckpt.CheckpointManager(
            root,
            save_when=ckpt.save_when.Any(
                ckpt.save_when.EverySteps(1), ckpt.save_when.Preempted(TERM)
            ),
        ) as mgr:
            state = train(fresh())
            await mgr.save(0, state)
            before = mgr.reached_preemption(0)
            batch = asyncio.Event()
            loop = asyncio.get_running_loop()

            def fetch() -> None:
                signal_here()
                loop.call_soon_threadsafe(batch.set)

            threading.Thread(target=fetch).start()
            await batch.wait()
            await mgr.save(1, train(state))
            return [before, mgr.reached_preemption(1)]

    return asyncio.run(main())


def in_the_save(root: Path) -> list[bool]:
    """Get the signal while `save` waits."""
    handlers = [SignallingHandler()]
    with ckpt.sync.CheckpointManager(
        root,
        handlers=handlers,
        save_when=ckpt.save_when.Any(ckpt.save_when.EverySteps(1), ckpt.save_when.Preempted(TERM)),
    ) as mgr:
        found = []
        for step in range(3):
            tree = {"w": jnp.full(4096, step + 1.0)}
            mgr.save(step, Signalling(tree) if step == 1 else tree)
            found.append(mgr.reached_preemption(step))
        return found


def in_the_awaited_save(root: Path) -> list[bool]:
    """The same in asyncio."""

    async def main() -> list[bool]:
        handlers = [SignallingHandler()]
        found = []
        async with ckpt.CheckpointManager(
            root,
            handlers=handlers,
            save_when=ckpt.save_when.Any(
                ckpt.save_when.EverySteps(1), ckpt.save_when.Preempted(TERM)
            ),
        ) as mgr:
            for step in range(3):
                tree = {"w": jnp.full(4096, step + 1.0)}
                await mgr.save(step, Signalling(tree) if step == 1 else tree)
                found.append(mgr.reached_preemption(step))
        return found

    return asyncio.run(main())


def at_exit(root: Path) -> None:
    """Get the signal while interpreter exit waits for a commit of a manager nobody closed."""
    gate = threading.Event()
    mgr = ckpt.sync.CheckpointManager(
        root,
        handlers=[OddHandler()],
        save_when=ckpt.save_when.Any(ckpt.save_when.EverySteps(1), ckpt.save_when.Preempted(TERM)),
    )
    KEPT.append(mgr)
    mgr.save(0, Odd(train(fresh()), gate=gate))

    def is_exiting() -> bool:
        frame: FrameType | None = main_frame()
        while frame is not None and frame.f_code.co_name != "finish_at_exit":
            frame = frame.f_back
        return frame is not None

    def watch() -> None:
        # Nothing signals that the exit waits, so it is looked at.
        while not is_exiting():
            time.sleep(0.01)
        signal_here()
        gate.set()

    threading.Thread(target=watch, daemon=True).start()


def hangs() -> None:
    """Never ask again; the second signal has to end it."""
    with ckpt.sync.CheckpointManager(
        root,
        save_when=ckpt.save_when.Any(ckpt.save_when.EverySteps(1), ckpt.save_when.Preempted(TERM)),
    ) as mgr:
        mgr.save(0, fresh()).result()
        # Also tells of signals that came before it was asked, which `signal.pause` would miss.
        came, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing)
        tell("ready")
        os.read(came, 1)
        tell("noticed")
        os.read(came, 1)
        tell("still there")


def forks(root: Path) -> list[int]:
    """A forked child, a data loader's say, dies of the signal."""
    warnings.simplefilter("ignore")  # Python and jax warn of the fork, rightly
    with ckpt.sync.CheckpointManager(
        root,
        save_when=ckpt.save_when.Any(ckpt.save_when.EverySteps(1), ckpt.save_when.Preempted(TERM)),
    ) as mgr:
        mgr.save(0, train(fresh())).result()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            # Python forgets signals that come while it forks.
            os.write(writing, b"x")
            signal.alarm(30)
            # One long pause would miss a signal that comes just before it.
            while True:
                time.sleep(0.01)
        os.read(reading, 1)
        os.kill(child, signal.SIGTERM)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return [code, mgr.reached_preemption(0)]


def signals_itself() -> None:
    """All of those that need nobody else, one after the other; `at_exit` as the last one."""
    for part in (in_an_await, in_the_save, in_the_awaited_save, forks, at_exit):
        show([part.__name__, part(Path(root, part.__name__))])


def agrees(signals: tuple[signal.Signals, ...] = TERM) -> None:
    """Train together with another process, on one root; JAX's handlers stay."""
    rank, address = int(rest[0]), f"127.0.0.1:{rest[1]}"
    jax.distributed.initialize(
        address,
        2,
        rank,
        coordinator_bind_address=address if rank == 0 else None,
        cluster_detection_method="deactivate",
        initialization_timeout=60,
        heartbeat_timeout_seconds=60,
        shutdown_timeout_seconds=60,
    )
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)]
    plain(signals)
    assert before == [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)]
    jax.distributed.shutdown()


def agrees_on_another_signal() -> None:
    """The same, told by a signal that JAX does not know."""
    agrees((signal.SIGUSR1, signal.SIGTERM))


def alone() -> None:
    """Be one process of one."""
    address = f"127.0.0.1:{rest[1]}"
    jax.distributed.initialize(
        address,
        1,
        0,
        coordinator_bind_address=address,
        cluster_detection_method="deactivate",
        initialization_timeout=60,
    )


def changes_hands() -> None:
    """JAX takes SIGTERM over from a manager that is open; then its service is off."""
    with ckpt.sync.CheckpointManager(
        root,
        save_when=ckpt.save_when.Any(ckpt.save_when.EverySteps(1), ckpt.save_when.Preempted(TERM)),
    ) as mgr:
        early = mgr.reached_preemption(0)
        alone()
    with ckpt.sync.CheckpointManager(
        root,
        save_when=ckpt.save_when.Any(ckpt.save_when.EverySteps(1), ckpt.save_when.Preempted(TERM)),
    ) as mgr:
        signal_here()
        for step in itertools.count(1):
            if mgr.reached_preemption(step):
                break
            # JAX agrees on the step in threads of its own, and tells by the answer only.
            time.sleep(0.01)
    show([early, mgr.reached_preemption(step + 1)])
    jax.distributed.shutdown()

    jax.config.update("jax_enable_preemption_service", False)
    alone()
    with ckpt.sync.CheckpointManager(root) as mgr:
        mgr.save(0, fresh())
        show(mgr.reached_preemption(0))
    try:
        with ckpt.sync.CheckpointManager(
            root,
            save_when=ckpt.save_when.Any(
                ckpt.save_when.EverySteps(1), ckpt.save_when.Preempted(TERM)
            ),
        ):
            raise AssertionError
    except ckpt.errors.InvalidArgumentError as error:
        show(str(error))
    jax.distributed.shutdown()


globals()[scenario]()
