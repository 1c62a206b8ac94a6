"""One process of a job that uses managers in every way at which nothing goes wrong.

`call_in_job.py ROOT`. Tells by name what each of the functions below has found.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any

import anyio
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt
import ckpt.sync
from ckpt.coordination._jobs import SingleProcess, default_coordinator
from ckpt.errors import CheckpointError
from ckpt.storage._local.storage import LocalStorage
from ckpt.testing.clock import set_clock
from tests.support.real_jobs import tell

root = Path(sys.argv[1])
me, count = jax.process_index(), jax.process_count()
line = Mesh(np.array(jax.devices()), ("x",))
values = default_coordinator().key_values()
LIMIT = 2.0
TIMEOUTS = ckpt.Timeouts(coordination=LIMIT)
SHAPE = (64, 1024)


def state(step: int) -> dict[str, Any]:
    sharding = NamedSharding(line, P("x"))
    data = np.full(SHAPE, step, np.float32)
    array = jax.make_array_from_callback(SHAPE, sharding, lambda i: data[i])
    return {"w": array, "step": step}


def is_right(found: Any, step: int) -> bool:
    shards = found["w"].addressable_shards
    return found["step"] == step and all(bool((np.asarray(s.data) == step).all()) for s in shards)


def manager(name: str, **options: Any) -> Any:
    return ckpt.sync.CheckpointManager(root / name, timeouts=TIMEOUTS, **options)


def together(name: str) -> None:
    """Wait until all processes have come here."""

    async def wait() -> None:
        await values.put(f"{name}/{me}", b"")
        for other in range(count):
            assert await values.wait(f"{name}/{other}", 120) is not None

    anyio.run(wait)


def one_after_the_other(name: str) -> None:
    """Let the processes go on from here only once those before them have come to the end."""

    async def wait() -> None:
        for other in range(me):
            assert await values.wait(f"{name}/{other}", 120) is not None

    anyio.run(wait)


def done(name: str) -> None:
    anyio.run(values.put, f"{name}/{me}", b"")


def two_roots() -> Any:
    """Two managers of one job, on roots of their own, with saves under way in both."""
    with manager("one") as one, manager("two") as two:
        commits = [mgr.save(step, state(step)) for step in range(3) for mgr in (one, two)]
        steps = [commit.result(60).step for commit in commits]
        good = [is_right(mgr.restore(like=state(0)), 2) for mgr in (two, one)]
        return [steps, good, one.all_steps(), two.all_steps()]


def in_a_row() -> Any:
    """Saves that are called while others are under way: all are made, in their order."""
    with manager("row") as mgr:
        commits = [mgr.save(step, state(step)) for step in range(6)]
        mgr.wait_until_finished()
        return [[commit.done() for commit in commits], mgr.all_steps()]


def slow_in_a_row() -> Any:
    """The same behind a policy, where each save takes long, and moves."""
    write = LocalStorage.write_block

    async def slowly(*arguments: Any) -> None:
        await anyio.sleep(LIMIT * 0.4)
        await write(*arguments)

    LocalStorage.write_block = slowly  # type: ignore[assignment]
    try:
        with manager("slow", save_when=lambda step, previous, context: True) as mgr:
            commits = [mgr.save(step, state(step)) for step in range(6)]
            return [commit.result(60).step for commit in commits]
    finally:
        LocalStorage.write_block = write


def far_ahead() -> Any:
    """The primary decides about step after step, and the others come much later."""
    with manager("ahead", save_when=ckpt.save_when.EverySteps(100)) as mgr:
        mgr.save(0, state(0)).result(60)
        together("ahead begins")
        if me:
            anyio.run(values.wait, "ahead/0", 60.0)
        skipped = [mgr.save(step, state(step)).skipped for step in range(1, 8)]
        wanted = [mgr.should_save(50) for _ in range(3)]
        done("ahead")
        return [[bool(each) for each in skipped], wanted, mgr.save(100, state(100)).result(60).step]


def by_time() -> Any:
    """What a policy makes of the time of each process; the primary's counts."""
    now = [100.0 * me]

    def clock() -> float:
        now[0] += 1 + me
        return now[0]

    def every_third(step: int, previous: Any, context: ckpt.save_when.SaveContext) -> bool:
        return int(context.now) % 3 == 0

    with set_clock(clock), manager("time", save_when=every_third) as mgr:
        found = [bool(mgr.save(step, state(step))) for step in range(8)]
        found.append(bool(mgr.save(8, state(8), force=True)))
        mgr.wait_until_finished()
        together("by time")
        return [found, mgr.all_steps()]


def skips() -> Any:
    """With backlog="skip" the primary says whether one is under way."""
    with manager("skip", staging=ckpt.Staging(backlog="skip")) as mgr:
        storage, called = mgr._service.storage, threading.Event()
        publish = storage.publish

        async def held(*args: Any, **options: Any) -> None:
            await anyio.to_thread.run_sync(called.wait, 60.0)
            await publish(*args, **options)

        storage.publish = held
        commits = [mgr.save(step, state(step)) for step in range(4)]
        called.set()
        mgr.wait_until_finished()
        together("skips")
        return [[commit.stage for commit in commits], mgr.all_steps()]


def told_with_it() -> Any:
    """Metrics, metadata and what replaces a step."""
    with manager("told", custom_metadata={"run": "a"}) as mgr:
        mgr.save(1, state(1), metrics={"loss": 0.5}, custom_metadata={"note": me}).result(60)
        mgr.save(1, state(7), metrics={"loss": 0.25}, if_exists="replace").result(60)
        together("overwritten")
        info = mgr.metadata(1).info
        return [
            is_right(mgr.restore(1, like=state(0)), 7),
            info.metrics,
            info.custom_metadata,
            mgr.root_metadata(),
        ]


def exists() -> Any:
    """A step that is there already."""
    with manager("told") as mgr:
        try:
            mgr.save(1, state(1)).result(60)
        except CheckpointError as error:
            return [type(error).__name__, is_right(mgr.restore(1, like=state(0)), 7)]
    return None


def keeps() -> Any:
    """Only the latest step is kept, while others are restored."""
    found = []
    with manager("keeps", keep=ckpt.keep.Latest(1)) as mgr:
        for step in range(6):
            commit = mgr.save(step, state(step))
            if step:
                found.append(mgr.restore(like=state(0))["step"] in (step - 1, step))
            commit.result(60)
        mgr.wait_until_finished()
        together("kept")
        return [found, mgr.all_steps()]


def pins_and_deletes() -> Any:
    with manager("pins") as mgr:
        for step in range(3):
            mgr.save(step, state(step)).result(60)
        mgr.pin(1, "best")
        refused = ""
        try:
            mgr.delete(1)
        except CheckpointError as error:
            refused = type(error).__name__
        mgr.delete(0)
        together("deleted")
        pinned = sorted(mgr.pins())
        together("looked")
        unpinned = mgr.unpin(1, "best")
        return [refused, pinned, unpinned, mgr.all_steps()]


def in_asyncio() -> Any:
    async def main() -> Any:
        async with ckpt.CheckpointManager(root / "async", timeouts=TIMEOUTS) as mgr:
            commits = [await mgr.save(step, state(step)) for step in range(3)]
            infos = [await commit for commit in commits]
            good = is_right(await mgr.restore(like=state(0)), 2)
            return [[info and info.step for info in infos], good]

    return asyncio.run(main())


def at_once() -> Any:
    """One-shot, by all."""
    path = root / "final"
    info = ckpt.sync.save(path, state(5), timeouts=TIMEOUTS)
    return [info.step, is_right(ckpt.sync.load(path, like=state(0)), 5), ckpt.sync.verify(path).ok]


def alone() -> Any:
    """A process on its own, in a job of several."""
    one_after_the_other("alone")
    try:
        if me:
            return "not asked"
        host = {"w": np.full(5, 3), "step": 3}
        with manager("alone", coordinator=SingleProcess()) as mgr:
            mgr.save(3, host).result(60)
            refused = ""
            try:
                mgr.save(4, state(4)).result(60)
            except CheckpointError as error:
                refused = str(error)
            return [bool((mgr.restore()["w"] == 3).all()), mgr.all_steps(), refused]
    finally:
        done("alone")


CALLS = (
    two_roots,
    in_a_row,
    slow_in_a_row,
    far_ahead,
    by_time,
    skips,
    told_with_it,
    exists,
    keeps,
    pins_and_deletes,
    in_asyncio,
    at_once,
    alone,
)


def main() -> None:
    chosen = sys.argv[2:]
    found: dict[str, Any] = {}
    for call in CALLS:
        if not chosen or call.__name__ in chosen:
            together(call.__name__)
            try:
                found[call.__name__] = call()
            except Exception as error:
                found[call.__name__] = f"{type(error).__name__}: {error}"
            sys.stdout.write(f"{call.__name__}: {found[call.__name__]}\n")
    tell(found)


main()
