"""One process of a job in which something goes wrong: `fail_in_job.py ROOT SECONDS SCENARIO...`.

A scenario is `WHAT:CALL:STAGE:INDEX`: the processes make one call together, and when process INDEX
comes to STAGE of it, WHAT happens there: it stands at a mark, and its test kills or stops it
(`kill`, `stop`), it meets an error (`error`), its file system takes no more (`full`), its save is
cancelled (`cancel`, and `late` once it is too late for that), it is slow (`slow`), or makes one
call more or fewer (`more`, `fewer`). All tell how each call ended, after how many seconds.
"""

from __future__ import annotations

import asyncio
import functools
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt
import ckpt._steps.reader
import ckpt.sync
from ckpt._job.agreement.failures import introduce
from ckpt._job.agreement.operation import Operation
from ckpt.coordination._jobs import default_coordinator
from ckpt.handlers._pytree import PyTreeHandler
from ckpt.storage._local import storage as local_storage
from ckpt.storage._local.storage import LocalStorage
from tests.support.real_jobs import at, tell

root, seconds, scenarios = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
me, count = jax.process_index(), jax.process_count()
line = Mesh(np.array(jax.devices()), ("x",))
values = default_coordinator().key_values()
SHAPE = (512, 1024)
SOFT, HARD = resource.getrlimit(resource.RLIMIT_FSIZE)


def state(step: int) -> dict[str, Any]:
    """Return leaves that all write parts of, one that is everywhere, and some of each process."""
    found: dict[str, Any] = {"numpy": np.full(5000, step), "step": step}
    for number in range(12):
        sharding = NamedSharding(line, P("x") if number else P())
        data = np.full(SHAPE, step + number, np.float32)
        found[f"w{number}"] = jax.make_array_from_callback(SHAPE, sharding, data.__getitem__)
    return found


def is_right(found: dict[str, Any], step: int) -> bool:
    good = [found["step"] == step, bool((found["numpy"] == step).all())]
    for number in range(12):
        shards = found[f"w{number}"].addressable_shards
        good += [bool((np.asarray(each.data) == step + number).all()) for each in shards]
    return all(good)


class Scenario:
    """What is to happen next, and where."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.what, self.call, self.stage, who = text.split("#")[0].split(":")
        self.is_mine = int(who) == me
        self.met = False
        self.mgr: Any = None


now = Scenario("none:none:none:-1")


async def reach(stage: str) -> None:
    """Come to a stage; only the first time counts, but for a slow one."""
    if now.what == "late":
        await cancel_late(stage)
        return
    if not now.is_mine or stage != now.stage or (now.met and now.what != "slow"):
        return
    now.met = True
    if now.what in ("kill", "stop"):
        await anyio.to_thread.run_sync(at, now.text)
    elif now.what == "error":
        raise RuntimeError(f"no luck at {stage}")
    elif now.what == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, HARD))
    elif now.what == "cancel":
        now.mgr._service.saves.commits._cancel_all()
    elif now.what == "slow":
        # It moves, and takes longer than the limit in all.
        await anyio.sleep(seconds / 2)


async def cancel_late(stage: str) -> None:
    """Cancel the save of one process while the primary, which has decided, publishes."""
    if me == 0 and stage == "publish":
        await values.put(f"{now.text}/decided", b"")
        assert await values.wait(f"{now.text}/cancelled", 30) is not None
    elif now.is_mine and stage == "conclude" and not now.met:
        now.met = True
        assert await values.wait(f"{now.text}/decided", 30) is not None
        now.mgr._service.saves.commits._cancel_all()
        with anyio.CancelScope(shield=True):
            await values.put(f"{now.text}/cancelled", b"")


def staged(owner: Any, name: str, stage: str, *, after: bool = False, path: str = "") -> None:
    """Make `owner.name` come to a stage before it runs, or after."""
    function: Callable[..., Awaitable[Any]] = getattr(owner, name)

    @functools.wraps(function)
    async def run(*args: Any, **options: Any) -> Any:
        counts = not path or path in args
        if counts and not after:
            await reach(stage)
        result = await function(*args, **options)
        if counts and after:
            await reach(stage)
        return result

    setattr(owner, name, run)


local_storage._LARGEST_FILE_BYTES = 1 << 20
staged(LocalStorage, "begin", "begin")
staged(LocalStorage, "join", "begin")
staged(PyTreeHandler, "stage", "stage")
staged(LocalStorage, "write_block", "write")
staged(Operation, "report", "report")
staged(Operation, "report", "reported", after=True)
staged(LocalStorage, "write", "manifest", path="ckpt.json")
staged(Operation, "decide", "decide")
staged(LocalStorage, "publish", "publish")
staged(Operation, "conclude", "conclude")
staged(PyTreeHandler, "load", "load")
staged(LocalStorage, "remove", "remove")


def manager(**options: Any) -> Any:
    timeouts = ckpt.Timeouts(coordination=seconds)
    return ckpt.sync.CheckpointManager(root, timeouts=timeouts, **options)


def call(mgr: Any, step: int, first: int) -> Any:
    """Make the call of the scenario, and return what it came to, as JSON has it."""
    now.mgr = mgr
    if now.is_mine and now.what == "fewer":
        return "left out"
    if now.call == "save":
        found = mgr.save(step, state(step)).result(60).step
        if now.is_mine and now.what == "more":
            mgr.save(step + 1000, state(step)).result(60)
        return found
    if now.call == "async_save":

        async def main() -> Any:
            timeouts = ckpt.Timeouts(coordination=seconds)
            async with ckpt.CheckpointManager(root, timeouts=timeouts) as other:
                now.mgr = other
                info = await (await other.save(step, state(step)))
                assert info is not None
                return info.step

        return asyncio.run(main())
    if now.call == "one":
        timeouts = ckpt.Timeouts(coordination=seconds)
        where = root.with_name("one") / f"{step}"
        return ckpt.sync.save(where, state(step), timeouts=timeouts).step
    if now.call == "restore":
        return is_right(mgr.restore(first, like=state(0)), first)
    if now.call == "delete":
        return mgr.delete(first)
    if now.call == "pin":
        return mgr.pin(first, f"of-{step}")
    if now.call == "should_save":
        return mgr.should_save(step)
    assert now.call == "open"
    with manager() as other:
        return other.should_save(step) and other.save(step, state(step)).result(60).step


def run(scenario: str, step: int, first: int, mgr: Any) -> None:
    global now
    now = Scenario(scenario)
    began = time.monotonic()
    said: dict[str, Any] = {"scenario": scenario, "step": step}
    try:
        if now.is_mine and now.stage == "before":
            if now.what in ("kill", "stop"):
                at(now.text)
            elif now.what == "error":
                raise RuntimeError("no luck before it was called")
        said["result"] = call(mgr, step, first)
    except Exception as error:
        said |= {
            "error": type(error).__name__,
            "message": str(error),
            "missing": list(getattr(error, "missing", ())),
            "errno": getattr(error, "errno", None),
        }
    said |= {"seconds": time.monotonic() - began, "met": now.met}
    resource.setrlimit(resource.RLIMIT_FSIZE, (SOFT, HARD))
    tell(said)


def together(number: int, alive: set[int]) -> None:
    """Wait until all have come so far, so that the seconds mean something."""

    async def wait() -> None:
        await values.put(f"ready/{number}/{me}", b"")
        for other in sorted(alive):
            assert await values.wait(f"ready/{number}/{other}", 120) is not None

    anyio.run(wait)


def main() -> None:
    alive = set(range(count))
    anyio.run(introduce, values, me)
    with manager() as mgr:
        first = (mgr.latest_step() or 0) + 1
        together(-1, alive)
        tell({"scenario": "first", "step": mgr.save(first, state(first)).result(60).step})
        for number, scenario in enumerate(scenarios):
            together(number, alive)
            sys.stdout.write(f"begun {scenario}\n")
            run(scenario, first + 1 + number, first, mgr)
            if scenario.startswith("kill"):
                alive.discard(int(scenario.split("#")[0].split(":")[-1]))
        at("end")


main()
