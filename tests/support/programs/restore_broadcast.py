"""One process of a job that restores with `broadcast_bytes`: `restore_broadcast.py ROOT WHAT...`.

What is stored, and how it is compared, is that of `restoring.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt
import ckpt.sync
from ckpt._runtime.futures import waker
from ckpt.errors import CheckpointError
from tests.support.real_jobs import at, tell

root = Path(sys.argv[1])
devices = jax.devices()
index, count = jax.process_index(), jax.process_count()
names = json.loads((root / "dtypes.json").read_text())
MIB = 1 << 20
TIMEOUTS = ckpt.Timeouts(coordination=10.0)


def values(name: str) -> np.ndarray[Any, Any]:
    shape, dtype = names[name]
    flat = np.arange(int(np.prod(shape))) % 251 + len(name)
    return flat.astype(dtype).reshape(shape)


def wrong(name: str, array: Any, wanted: np.ndarray[Any, Any] | None = None) -> list[str]:
    whole = values(name) if wanted is None else wanted
    data = jax.random.key_data(array) if name == "keys" else array
    if tuple(data.shape) != whole.shape:
        return [f"{name}: shape {data.shape}"]
    if isinstance(data, np.ndarray):
        return [] if (data == whole).all() else [f"{name} is wrong"]
    return [
        f"{name}: {shard.index} is wrong"
        for shard in data.addressable_shards
        if np.asarray(shard.data).dtype != data.dtype
        or not (np.asarray(shard.data) == whole[shard.index]).all()
    ]


def like(name: str, sharding: Any, dtype: Any = None) -> Any:
    shape, stored = names[name]
    if name == "keys":
        kind = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 4)).dtype
        return jax.ShapeDtypeStruct(shape[:-1], kind, sharding=sharding)
    return jax.ShapeDtypeStruct(tuple(shape), dtype or stored, sharding=sharding)


def mesh(*shape: int, order: int = 1) -> Mesh:
    return Mesh(np.array(devices[::order]).reshape(shape), ("x", "y")[: len(shape)])


def target() -> dict[str, Any]:
    """Everything held by one process, by two, and by all of them."""
    line = mesh(len(devices))
    tiles = mesh(2, len(devices) // 2)
    wanted = {
        "rows": NamedSharding(line, P("x")),
        "columns": NamedSharding(tiles, P(None, "y")),
        "tiles": NamedSharding(tiles, P("x")),
        "partly": NamedSharding(tiles, P("y")),
        "everywhere": NamedSharding(line, P()),
        "packed everywhere": NamedSharding(line, P()),
        "packed": NamedSharding(tiles, P("x")),
        "small": NamedSharding(line, P()),
        "scalar": NamedSharding(line, P()),
        "keys": NamedSharding(line, P()),
        "empty": NamedSharding(line, P()),
    }
    found = {name: like(name, sharding) for name, sharding in wanted.items()}
    found["cast"] = like("cast", wanted["everywhere"], jnp.bfloat16)
    found["numpy"] = np.empty(*names["numpy"])
    return found


def problems(found: dict[str, Any]) -> list[str]:
    return [
        problem
        for name, array in found.items()
        for problem in wrong(
            name, array, values(name).astype(jnp.bfloat16) if name == "cast" else None
        )
    ]


def total(events: list[ckpt.types.Event], phase: str) -> int:
    return sum(event.nbytes for event in events if event.phase == phase)


def plain() -> dict[str, Any]:
    """The plain manager, with much memory and with as little as may be."""
    told: dict[str, Any] = {}
    for nbytes in (64 * MIB, MIB):
        events: list[ckpt.types.Event] = []
        with ckpt.sync.CheckpointManager(
            root, mode="r", timeouts=TIMEOUTS, observers=[events.append]
        ) as mgr:
            found = mgr.restore(1, target(), broadcast_bytes=nbytes)
        told[str(nbytes)] = {
            "problems": problems(found),
            "fetched": total(events, "fetch"),
            "rounds": sum(event.phase == "exchange" for event in events),
            "largest": max(event.nbytes for event in events if event.phase == "exchange"),
        }
    # What jax finds the arrays to be, in a program of all processes.
    whole = jax.jit(lambda a, b: a.sum() + b.sum())(found["everywhere"], found["rows"])
    told["total"] = float(whole.addressable_data(0))
    return told


def awaited() -> dict[str, Any]:
    """The asyncio manager; programs are run on the thread that awaits."""
    threads: set[str] = set()

    def compiled(event: str, duration_secs: float, **_: str | int) -> None:
        if "backend_compile" in event:
            threads.add(threading.current_thread().name)

    jax.monitoring.register_event_duration_secs_listener(compiled)
    lags: list[float] = []

    async def beat() -> None:
        while True:
            began = time.monotonic()
            await anyio.sleep(0.005)
            lags.append(time.monotonic() - began - 0.005)

    async def main() -> Any:
        async with (
            ckpt.CheckpointManager(root, mode="r", timeouts=TIMEOUTS) as mgr,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(beat)
            found = await mgr.restore(1, target(), broadcast_bytes=8 * MIB)
            tasks.cancel_scope.cancel()
        return found

    found = asyncio.run(main())
    return {"problems": problems(found), "beats": len(lags), "compiled": sorted(threads)}


def surgery() -> dict[str, Any]:
    """An array made of several stored ones, and one stored array for several."""
    line, tiles = mesh(len(devices)), mesh(2, len(devices) // 2)
    rows, columns = names["rows"][0]
    both = jax.ShapeDtypeStruct(
        (rows, 2 * columns), np.float32, sharding=NamedSharding(tiles, P("x"))
    )
    adapt = ckpt.Adapt(
        select=["rows", "everywhere"],
        transforms=[ckpt.surgery.concatenate(["rows", "everywhere"], to="both", axis=1)],
    )
    with ckpt.sync.CheckpointManager(root, mode="r", timeouts=TIMEOUTS) as mgr:
        found = mgr.restore(1, {"both": both}, adapt=adapt, broadcast_bytes=4 * MIB)
        # As training loops have it, against what they did not mean to do.
        with jax.transfer_guard("disallow"):
            guarded = mgr.restore(1, target(), broadcast_bytes=4 * MIB)
        wanted = {
            "b": {"rows": like("rows", NamedSharding(tiles, P("x")))},
            "a": {"rows": like("rows", NamedSharding(line, P()))},
        }
        # Nobody has to name them in the order of the others.
        wanted = dict(sorted(wanted.items())) if index == 1 else wanted
        items = mgr.restore(2, items=wanted, broadcast_bytes=4 * MIB)
    joined = np.concatenate([values("rows"), values("everywhere")], 1)
    return {
        "problems": wrong("both", found["both"], joined)
        + wrong("rows", items["a"]["rows"])
        + wrong("rows", items["b"]["rows"])
        + problems(guarded)
    }


def outcome(call: Any) -> Any:
    try:
        return {"problems": problems(call())}
    except CheckpointError as error:
        return outcome_of(error)


def outcome_of(error: CheckpointError) -> dict[str, Any]:
    return {"error": type(error).__name__, "text": str(error)}


def refusals() -> dict[str, Any]:
    """What does not fit together; and that it goes on afterwards."""
    everywhere = NamedSharding(mesh(len(devices)), P())
    one = {"everywhere": like("everywhere", everywhere)}
    two = {**one, "rows": like("rows", everywhere)}
    adapt = ckpt.Adapt(extra="ignore")
    told: dict[str, Any] = {}
    with ckpt.sync.CheckpointManager(root, mode="r", timeouts=TIMEOUTS) as mgr:
        nbytes = 4 * MIB if index else 8 * MIB
        told["bytes"] = outcome(lambda: mgr.restore(1, one, adapt=adapt, broadcast_bytes=nbytes))
        none = None if index else 4 * MIB
        told["none"] = outcome(lambda: mgr.restore(1, one, adapt=adapt, broadcast_bytes=none))
        like_ = one if index else two
        told["like"] = outcome(lambda: mgr.restore(1, like_, adapt=adapt, broadcast_bytes=4 * MIB))
        # One of them has nothing to share.
        alone = {"everywhere": np.empty(*names["everywhere"])} if index == 1 else one
        began = time.monotonic()
        told["alone"] = outcome(lambda: mgr.restore(1, alone, adapt=adapt, broadcast_bytes=4 * MIB))
        # As many groups, of as many processes, of the same bytes, but others.
        tiles = mesh(2, len(devices) // 2)
        small = {"small": like("small", NamedSharding(tiles, P("x" if index < 2 else "y")))}
        told["groups"] = outcome(lambda: mgr.restore(1, small, adapt=adapt, broadcast_bytes=MIB))
        told["seconds"] = time.monotonic() - began
        told["good"] = outcome(lambda: mgr.restore(1, two, adapt=adapt, broadcast_bytes=4 * MIB))
        for given in (True, 5, "1 GB", 1.5e9):
            told[repr(given)] = outcome(
                lambda given=given: mgr.restore(1, one, adapt=adapt, broadcast_bytes=given)
            )
    return told


def damaged() -> dict[str, Any]:
    """One step has a flipped byte, another one a file that was cut; a third is whole."""
    told: dict[str, Any] = {}
    with ckpt.sync.CheckpointManager(root, mode="r", timeouts=TIMEOUTS) as mgr:
        for step in (3, 4, 1):
            told[str(step)] = outcome(
                lambda step=step: mgr.restore(step, target(), broadcast_bytes=2 * MIB)
            )
    return told


def cancelled() -> dict[str, Any]:
    """Process 1 is cancelled while the others wait, then all restore again."""

    async def main() -> Any:
        events: list[str] = []
        async with ckpt.CheckpointManager(root, mode="r", timeouts=TIMEOUTS) as mgr:
            try:
                with anyio.CancelScope() as scope:
                    if index == 1:
                        scope.cancel()
                    await mgr.restore(1, target(), broadcast_bytes=2 * MIB)
            except CheckpointError as error:
                events.append(type(error).__name__)
            if scope.cancelled_caught:
                events.append("cancelled")
            found = await mgr.restore(1, target(), broadcast_bytes=2 * MIB)
        return {"events": events, "problems": problems(found)}

    return asyncio.run(main())


def stops() -> dict[str, Any]:
    """Process 1 goes no further after the first exchange."""

    def watch(event: ckpt.types.Event) -> None:
        if event.phase == "exchange" and index == 1:
            at("exchanged once")

    timeouts = ckpt.Timeouts(coordination=2.0)
    with ckpt.sync.CheckpointManager(root, mode="r", timeouts=timeouts, observers=[watch]) as mgr:
        began = time.monotonic()
        told = outcome(lambda: mgr.restore(1, target(), broadcast_bytes=2 * MIB))
        return {**told, "seconds": time.monotonic() - began}


def holds() -> dict[str, Any]:
    """The caller's loop of process 1 stands still as soon as its first share is read."""
    timeouts = ckpt.Timeouts(coordination=2.0)

    async def main() -> dict[str, Any]:
        is_read = anyio.Event()
        wake = waker(is_read)

        def watch(event: ckpt.types.Event) -> None:
            if event.phase == "fetch" and index == 1:
                wake()

        async def stand_still() -> None:
            await is_read.wait()
            at("is read")

        async with (
            ckpt.CheckpointManager(root, mode="r", timeouts=timeouts, observers=[watch]) as mgr,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(stand_still)
            began = time.monotonic()
            try:
                await mgr.restore(1, target(), broadcast_bytes=2 * MIB)
            except CheckpointError as error:
                seconds = time.monotonic() - began
                tasks.cancel_scope.cancel()
                tell({"holds": {**outcome_of(error), "seconds": seconds}})
                # Neither is the program on the devices waited for.
                os._exit(0)
        return {"error": None}

    return asyncio.run(main())


phases = {
    "plain": plain,
    "awaited": awaited,
    "surgery": surgery,
    "refusals": refusals,
    "damaged": damaged,
    "cancelled": cancelled,
    "stops": stops,
    "holds": holds,
}
tell({what: phases[what]() for what in sys.argv[2:]})
