"""Do operations with the other processes of a job: `run_operations.py SECONDS SCENARIO...`.

Each scenario is one operation after the other. In `fail:STAGE:INDEX` one process meets an error
there; in `stop:STAGE:INDEX` and `kill:STAGE:INDEX` it stands at a mark, and its test does the rest.
What every process tells of each is how it ended, with what, and after how many seconds. At the end
it waits for the test.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import anyio
import anyio.to_thread

from ckpt._job.agreement.failures import introduce
from ckpt._job.agreement.operation import Operation
from ckpt.coordination._jobs import default_coordinator
from ckpt.errors import StorageError
from tests.support.real_jobs import at, tell

job = default_coordinator()
me, count = job.process_index, job.process_count
seconds = float(sys.argv[1])
values = job.key_values()


async def reach(stage: str, scenario: str) -> None:
    what, there, who = scenario.split(":")
    if there != stage or int(who) != me:
        return
    if what == "fail":
        raise StorageError(f"no space at {stage}", errno=28, step=7, item="state", leaf="a.b")
    if what == "late":
        # Slower than the time limit, but it moves.
        for _ in range(6):
            await anyio.sleep(seconds / 4)
            current[0].advance(1)
    elif what == "idle":
        await anyio.sleep(seconds * 1.6)
    else:
        await anyio.to_thread.run_sync(at, scenario)


current: list[Operation] = []


async def operate(operation: Operation, scenario: str) -> str:
    outcome = None
    current[:] = [operation]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(operation.watch)
        await reach("lead", scenario)
        begin = await operation.lead(b"begin" if me == 0 else None)
        await reach("report", scenario)
        parts = await operation.report(b"part %d" % me)
        sys.stdout.write(f"reported {scenario}\n")
        if parts is not None:
            await reach("decide", scenario)
            await operation.decide()
            await reach("conclude", scenario)
            outcome = begin + b" " + b",".join(parts)
        else:
            await reach("decide", scenario)
            await reach("conclude", scenario)
        text = (await operation.conclude(outcome)).decode()
        tasks.cancel_scope.cancel()
    return text


async def one(number: int, scenario: str) -> dict[str, Any]:
    count_here = count + 1 if scenario == f"count:any:{me}" else count
    operation = Operation(
        values, me, count_here, f"op{number}", f"the save of step {number}", seconds
    )
    began = time.monotonic()
    said: dict[str, Any] = {"scenario": scenario}
    try:
        said["outcome"] = await operate(operation, scenario)
    except BaseException as error:
        raised = await operation.settle(error)
        while isinstance(raised, BaseExceptionGroup):
            raised = raised.exceptions[0]
        said |= {
            "error": type(raised).__name__,
            "message": str(raised),
            "missing": list(getattr(raised, "missing", ())),
            "errno": getattr(raised, "errno", None),
            "leaf": getattr(raised, "leaf", None),
        }
    said["seconds"] = time.monotonic() - began
    # Threads that wait for what nobody needs any more are let go.
    for _ in range(40):
        if waits():
            await anyio.sleep(0.05)
    said["waits"] = waits()
    return said


def waits() -> int:
    return sum(thread.name == "ckpt-wait" for thread in threading.enumerate())


async def main() -> None:
    await introduce(values, me)
    alive = set(range(count))
    for number, scenario in enumerate(sys.argv[2:]):
        # All begin together, so that the seconds mean something.
        await values.put(f"ready/{number}/{me}", b"")
        for other in alive:
            assert await values.wait(f"ready/{number}/{other}", 100) is not None
        sys.stdout.write(f"begun {scenario}\n")
        tell(await one(number, scenario))
        what, _, who = scenario.split(":")
        if what == "kill":
            alive.remove(int(who))
    at("end")


anyio.run(main)
