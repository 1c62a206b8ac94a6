"""Check what the processes of a job share: `peer_values.py`; each process tells what it found."""

from __future__ import annotations

import statistics
import threading
import time

import anyio

from ckpt._job.agreement.operation import Operation
from ckpt.coordination import _jax_service as jax_service
from ckpt.coordination._jax_service import JaxDistributed
from ckpt.coordination._jobs import default_coordinator
from tests.support.real_jobs import tell
from tests.unit.coordination.key_value_suite import check_key_values

# What is left of a wait that nobody wants any more holds up the end of a process for as long.
jax_service._POLL_SECONDS = 2.0

job = default_coordinator()
assert isinstance(job, JaxDistributed)
me, count = job.process_index, job.process_count
values = job.key_values()


async def together(name: str) -> None:
    await values.put(f"{name}/{me}", b"")
    for other in range(count):
        assert await values.wait(f"{name}/{other}", 60) is not None


async def operate(number: int) -> float:
    await together(f"ready/{number}")
    began = time.perf_counter()
    operation = Operation(values, me, count, f"cost/{number}", "a save", 30.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(operation.watch)
        await operation.lead(b"begin" * 20 if me == 0 else None)
        if await operation.report(b"part" * 100):
            await operation.decide()
        await operation.conclude(b"done" if me == 0 else None)
        tasks.cancel_scope.cancel()
    return time.perf_counter() - began


async def main() -> dict[str, object]:
    if me < 2:
        await check_key_values(values, f"suite/{me}")
    # The folders of all processes are gone, the parts of long values included.
    await together("checked")
    left = job._shared._client.key_value_dir_get_bytes("ckpt/parts/")  # type: ignore[attr-defined]
    # One election: exactly one of all wins.
    won = await values.put("election", b"%d" % me)
    seconds = [await operate(number) for number in range(20)]
    await together("measured")
    # The loop goes on while a request blocks its thread.
    lag = 0.0
    for _ in range(3):
        assert await values.wait("never/1", 0.05) is None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(values.wait, "never/1", 0.5)
        for _ in range(40):
            before = time.perf_counter()
            await anyio.sleep(0.01)
            lag = max(lag, time.perf_counter() - before)
    return {
        "me": me,
        "left": len(left),
        "won": won,
        "first": (await values.wait("election", 0) or b"").decode(),
        "median": statistics.median(seconds[5:]),
        "worst": max(seconds[5:]),
        "lag": lag,
        "threads": sum(thread.name == "ckpt-wait" for thread in threading.enumerate()),
    }


told = anyio.run(main)
if me == 0:
    # From a second event loop, of another kind.
    anyio.run(check_key_values, values, "again", backend="trio")


async def give_up() -> None:
    with anyio.move_on_after(0.1):
        await values.wait("never/2", 100)


# Ends with a wait under way; that must not abort the process.
anyio.run(give_up)
tell(told)
