"""Small programs that end in every way a training script can: `end_scripts.py SCENARIO ROOT`.

Each prints `end` where it has nothing more to do; those that look at something themselves print
what they found as one line of JSON before.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import ckpt
import ckpt.sync
from tests.support.odd_items import Odd, OddHandler
from tests.support.still_thread import wait_until_main_is_still

scenario, root = sys.argv[1:]
# 16 MiB: longer to write than a script needs to end.
STATE = {"w": np.arange(4 << 20, dtype=np.float32)}
SMALL = {"w": np.arange(8, dtype=np.float32)}
FIRE = ckpt.CheckpointError("the disk is on fire")
KEPT: list[Any] = []


def tell(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def end() -> None:
    tell("end")


def show(found: Any) -> None:
    tell(json.dumps(found))


def manager() -> ckpt.sync.CheckpointManager:
    return ckpt.sync.CheckpointManager(root, handlers=[OddHandler()])


def forgets_to_close() -> None:
    KEPT.append(manager())
    KEPT[0].save(0, STATE)
    end()


def forgets_to_close_in_a_function() -> None:
    mgr = manager()
    mgr.save(0, STATE)
    end()


def forgets_to_close_after_asyncio_run() -> None:
    async def main() -> None:
        KEPT.append(ckpt.CheckpointManager(root))
        await KEPT[0].save(0, STATE)

    asyncio.run(main())
    end()


def forgets_to_close_in_a_coroutine() -> None:
    async def main() -> None:
        mgr = ckpt.CheckpointManager(root)
        await mgr.save(0, STATE)

    asyncio.run(main())
    end()


def forgets_to_await_the_commit() -> None:
    async def main() -> None:
        async with ckpt.CheckpointManager(root) as mgr:
            await mgr.save(0, STATE)

    asyncio.run(main())
    end()


def leaves_a_pending_awaiter() -> None:
    async def main() -> None:
        KEPT.append(ckpt.CheckpointManager(root))
        commit = await KEPT[0].save(0, STATE)
        KEPT.append(asyncio.ensure_future(commit))
        await asyncio.sleep(0)

    asyncio.run(main())
    end()


def saves_in_a_thread_that_has_ended() -> None:
    def work() -> None:
        manager().save(0, STATE)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    end()


def never_uses_the_manager() -> None:
    KEPT.append(manager())
    end()


def calls_sys_exit() -> None:
    KEPT.append(manager())
    KEPT[0].save(0, STATE)
    end()
    sys.exit(3)


def calls_sys_exit_in_the_block() -> None:
    with manager() as mgr:
        mgr.save(0, STATE)
        end()
        sys.exit(3)


def raises() -> None:
    mgr = manager()
    mgr.save(0, STATE)
    end()
    raise ValueError("of the script")


def raises_in_the_block() -> None:
    async def main() -> None:
        async with ckpt.CheckpointManager(root) as mgr:
            await mgr.save(0, STATE)
            end()
            raise ValueError("of the script")

    asyncio.run(main())


def fails_unseen() -> None:
    KEPT.append(manager())
    KEPT[0].save(0, STATE)
    KEPT[0].save(1, Odd(SMALL, error=FIRE))
    end()


def never_ends() -> None:
    limit = ckpt.Timeouts(exit=0.5)
    KEPT.append(ckpt.sync.CheckpointManager(root, handlers=[OddHandler()], timeouts=limit))
    KEPT[0].save(0, STATE).result()
    KEPT[0].save(1, Odd(SMALL, hold="commit"))
    end()


def never_ends_and_cannot_be_stopped() -> None:
    limit = ckpt.Timeouts(exit=0.5)
    KEPT.append(ckpt.sync.CheckpointManager(root, handlers=[OddHandler()], timeouts=limit))
    KEPT[0].save(0, STATE).result()
    KEPT[0].save(1, Odd(SMALL, gate=threading.Event()))
    end()


def fails_unseen_in_a_function() -> None:
    mgr = manager()
    mgr.save(0, STATE)
    mgr.save(1, Odd(SMALL, error=FIRE))
    end()


def fails_unseen_in_the_block() -> None:
    with manager() as mgr:
        mgr.save(0, STATE).result()
        mgr.save(1, Odd(SMALL, error=FIRE))
        end()


def fails_and_is_looked_at() -> None:
    KEPT.append(manager())
    assert KEPT[0].save(1, Odd(SMALL, error=FIRE)).exception() is FIRE
    KEPT[0].save(0, STATE)
    end()


def meets_a_limit_of_the_file_system() -> None:
    """Save with files limited to 1 MiB, then without."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    found: dict[str, Any] = {}
    with manager() as mgr:
        mgr.save(0, SMALL).result()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, unlimited[1]))
        error = mgr.save(1, STATE).exception()
        assert isinstance(error, ckpt.errors.StorageError)
        found["error"] = [error.errno, error.step, error.item, error.leaf]
        found["left"] = sorted(os.listdir(root))
        found["latest"] = mgr.latest_step()
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        mgr.save(1, STATE).result()
        found["then"] = mgr.all_steps()
    show(found)
    end()


def is_interrupted() -> None:
    """Be interrupted while `save()` waits."""
    # A background job of a shell starts with the signal ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found: dict[str, Any] = {}
    stuck = Odd(STATE, hold="stage")

    def watch() -> None:
        stuck.reached.wait()
        wait_until_main_is_still()
        tell("reached")

    threading.Thread(target=watch).start()
    with manager() as mgr:
        mgr.save(0, SMALL).result()
        try:
            mgr.save(1, stuck)
        except KeyboardInterrupt:
            found["left"] = sorted(os.listdir(root))
            found["saving"] = mgr.is_saving_in_progress()
        mgr.save(1, SMALL).result()
        found["then"] = mgr.all_steps()
    show(found)
    end()


def forks() -> None:
    """Use everything in a forked child, with a save under way and a failed one not yet seen."""
    warnings.simplefilter("ignore")  # Python and jax warn of the fork, rightly
    gate = threading.Event()
    mgr = manager()
    KEPT.append(mgr)
    mgr.save(0, SMALL).result()
    failed = mgr.save(1, Odd(SMALL, error=FIRE))
    failed.add_done_callback(lambda _: gate.set())
    gate.wait()
    gate.clear()
    held = Odd(SMALL, gate=gate)
    # Made before the failure is raised.
    commit = mgr.save(2, held, force=True)
    other = ckpt.CheckpointManager(Path(root, "other"))
    asyncio.run(other.save(0, SMALL)).result()
    held.reached.wait()

    async def wait_for(commit: ckpt.Commit) -> None:
        await commit

    def enter() -> None:
        with mgr:
            raise AssertionError

    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: mgr.save(9, SMALL),
        "restore": lambda: mgr.restore(0),
        "all_steps": mgr.all_steps,
        "latest_step": mgr.latest_step,
        "metadata": lambda: mgr.metadata(0),
        "metrics": lambda: mgr.metrics(0),
        "verify": lambda: mgr.verify(0),
        "delete": lambda: mgr.delete(0),
        "wait_until_finished": mgr.wait_until_finished,
        "with": enter,
        "async save": lambda: asyncio.run(other.save(9, SMALL)),
        "async restore": lambda: asyncio.run(other.restore(0)),
        "commit.result": commit.result,
        "commit.exception": commit.exception,
        "await commit": lambda: asyncio.run(wait_for(commit)),
    }
    if os.fork() == 0:
        found = {}
        for name, call in calls.items():
            # What does not answer at once is cut off, so that the others are heard too.
            signal.signal(signal.SIGALRM, lambda *_: sys.exit("hangs"))
            signal.alarm(3)
            try:
                call()
                found[name] = "returned"
            except SystemExit:
                found[name] = "hangs"
            except BaseException as error:
                found[name] = type(error).__name__
        signal.alarm(10)
        show(found)
        end()
        sys.exit(7)
    show(os.waitstatus_to_exitcode(os.wait()[1]))
    gate.set()
    info = commit.result()
    show(info and info.step)
    end()


def blocks_the_library() -> None:
    """Make every blocking call on the library's own thread, in an observer and a done callback."""
    gate = threading.Event()
    ended = threading.Event()
    commits: list[ckpt.Commit] = []

    def attempt(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            show([name, type(error).__name__, str(error)])
        else:
            show([name, "returned", ""])

    def observe(event: ckpt.types.Event) -> None:
        if event.phase == "write":
            gate.wait()
            attempt("observer result", commits[0].result)
            attempt("observer exception", commits[0].exception)

    def callback(_: ckpt.Commit) -> None:
        calls: dict[str, Callable[[], Any]] = {
            "save": lambda: mgr.save(9, SMALL),
            "snapshot": lambda: mgr.snapshot(9, SMALL),
            "prefetch": lambda: mgr.prefetch(0),
            "restore": lambda: mgr.restore(0),
            "resume": lambda: mgr.resume(SMALL),
            "should_save": lambda: mgr.should_save(9),
            "all_steps": mgr.all_steps,
            "steps": mgr.steps,
            "latest_step": mgr.latest_step,
            "metadata": lambda: mgr.metadata(0),
            "metrics": lambda: mgr.metrics(0),
            "verify": lambda: mgr.verify(0),
            "delete": lambda: mgr.delete(0),
            "best_step": lambda: mgr.best_step("loss", "min"),
            "reload": mgr.reload,
            "root_metadata": mgr.root_metadata,
            "pin": lambda: mgr.pin(0, "release"),
            "unpin": lambda: mgr.unpin(0, "release"),
            "pins": mgr.pins,
            "partial": lambda: mgr.partial(9),
            "wait_until_finished": mgr.wait_until_finished,
            "close": mgr.close,
        }
        for name, call in calls.items():
            attempt(f"callback {name}", call)
        ended.set()

    mgr = ckpt.sync.CheckpointManager(root, observers=[observe])
    commits.append(mgr.save(0, SMALL))
    commits[0].add_done_callback(callback)
    gate.set()
    ended.wait()
    mgr.close()
    end()


globals()[scenario]()
