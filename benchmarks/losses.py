"""What runs and jobs lose by the way they end, and how soon they continue.

`lost`: each run saves a step to its root, takes snapshots in memory, and is ended. Then a new
process asks for the step to continue from: on the same host, at once; and on another host, when all
that was still being written is there.

`lost_jobs` runs docs/examples/job_with_peers.py, in which each process has its memory in a folder
of its own, as if it were a host, and kills what the table says.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from benchmarks.tables import table, value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.support.snapshots import Trainer

SNAPSHOTS = 3
PROGRAM = Path(__file__).parent.parent / "docs" / "examples" / "job_with_peers.py"
PROCESSES, SAVE_EVERY, KILLED_AT = 4, 200, 299
NEVER = 1_000_000
# Steps that are lost, and seconds until the run continues.
Loss = tuple[int, float]


def lost(place: Path, *, rounds: int = 3) -> str:
    """Returns what a run with snapshots in memory loses: the most of the steps, and a median."""
    found: dict[tuple[str, bool], list[Loss]] = defaultdict(list)
    for _ in range(rounds):
        for name, way in _WAYS.items():
            for same_host in (True, False):
                root = Path(tempfile.mkdtemp(dir=place)) / "run"
                found[name, same_host].append(_lost_run(way, root, same_host=same_host))
    rows = []
    for name in _WAYS:
        same, other = ([list(each) for each in zip(*found[name, here], strict=True)]
                       for here in (True, False))  # fmt: skip
        rows.append(
            (name, str(max(same[0])), str(max(other[0])), value(statistics.median(same[1])))
        )
    head = ("how it ends", "steps lost, same host", "steps lost, another host", "continues after")
    return (
        f"Runs of {SNAPSHOTS} snapshots or more of 7.5 MiB after a save to the root; the most of "
        f"{rounds} runs, and the median of the times on the same host, with the start of "
        f"Python and the import of jax.\n\n{table(head, rows)}"
    )


@contextlib.contextmanager
def _running(*command: object) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """Runs a program in a new Python; ends it with its processes that have no sessions."""
    with subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to end.

    Attributes:
        then: What the program does after its snapshots; see `take_snapshots.py`.
        end: Ends it, or waits until it has begun to end; returns what it has read of the output.
        loses_memory: Whether the memory of the host goes at the same time.
    """

    then: str
    end: Callable[[Trainer], list[str]]
    loses_memory: bool = False


def _kill(run: Trainer) -> list[str]:
    said = run.lines(until=f"ack {SNAPSHOTS}")
    run.kill()
    return said


def _terminate(run: Trainer) -> list[str]:
    said = run.lines(until="held")
    run.process.send_signal(signal.SIGTERM)
    return said


def _kill_agent(run: Trainer, acknowledged: int = SNAPSHOTS) -> list[str]:
    from tests.support.snapshots import children_of

    said = run.lines(until=f"ack {acknowledged}")
    for agent in children_of(run.process.pid):
        os.kill(agent, signal.SIGKILL)
    return said


def _kill_agent_first(run: Trainer) -> list[str]:
    """Kill the agent; the trainer some snapshots later, which have started another agent."""
    said = _kill_agent(run) + run.lines(until=f"ack {2 * SNAPSHOTS}")
    run.kill()
    return said


def _kill_both(run: Trainer) -> list[str]:
    said = _kill_agent(run)
    run.kill()
    return said


_WAYS = {
    "`kill -9`": _Way("wait", _kill),
    "an exception": _Way("raise", lambda run: []),
    "SIGTERM in a compile": _Way("compile", _terminate),
    "`kill -9` of the agent, and later of the trainer": _Way("go on", _kill_agent_first),
    "`kill -9` of both at once": _Way("wait", _kill_both),
    "the host is lost, with its memory": _Way("wait", _kill_both, loses_memory=True),
}


def _lost_run(way: _Way, root: Path, *, same_host: bool) -> Loss:
    import ckpt.sync
    from tests.support.numbered_states import state_of
    from tests.support.snapshots import PROGRAM as program
    from tests.support.snapshots import shared_memory, trainer

    with ckpt.sync.CheckpointManager(root) as mgr:
        mgr.save(0, state_of(0)).result()
    count = [-1, SNAPSHOTS] if way.then != "go on" else []
    with shared_memory() as memory, shared_memory() as other:
        with trainer(root, memory, way.then, *count) as run:
            said = way.end(run)
            if way.loses_memory:
                shutil.rmtree(memory, ignore_errors=True)
            if not same_host or way.then == "raise":
                said += run.end()[0]
            run.process.wait()
            began = time.perf_counter()
            # A new Python, and no fork of one that has imported all.
            where = memory if same_host else other
            with _running(program, root, where, "wait", -1, 1) as (_, output):
                start = output.readline()
                seconds = time.perf_counter() - began
                if same_host and way.then != "raise":
                    said += run.end()[0]
        newest = max(int(line[4:]) for line in said if line.startswith("ack "))
        return newest + 1 - int(start.split()[1]), seconds


def lost_jobs(place: Path, *, rounds: int = 3) -> str:
    """Returns what a job with copies on peers loses: the most of the steps, and a median."""
    from tests.support.snapshots import shared_memory

    found: dict[str, list[Loss]] = defaultdict(list)
    for _ in range(rounds):
        for name, killed in _KILLED.items():
            with shared_memory() as memory:
                root = Path(tempfile.mkdtemp(dir=place)) / "run"
                found[name].append(_lost_job(killed, root, memory))
    rows = []
    for name, losses in found.items():
        steps, seconds = zip(*losses, strict=True)
        rows.append((name, str(max(steps)), value(statistics.median(seconds))))
    return (
        f"A job of {PROCESSES} processes that takes a snapshot every 20 steps and saves to its "
        f"root every {SAVE_EVERY}, killed after step {KILLED_AT}; the most of {rounds} "
        "runs, and the median of the times, with the start of all processes and the imports of "
        "jax.\n\n" + table(("what is killed", "steps lost", "continues after"), rows)
    )


@dataclass(frozen=True, slots=True)
class _Killed:
    """What is killed.

    Attributes:
        processes: Which processes get `kill -9`.
        hosts: Whose memory is lost at the same time, or when the agents of that job have written.
        terminates: Whether the whole job gets SIGTERM instead, and `kill -9` five seconds later.
    """

    processes: tuple[int, ...] = ()
    hosts: tuple[int, ...] = ()
    terminates: bool = False


_ALL = (0, 1, 2, 3)
_KILLED = {
    "one process": _Killed((1,)),
    "one process, with the memory of its host": _Killed((1,), (1,)),
    "all processes": _Killed(_ALL),
    "all processes, with the memory of one host": _Killed(_ALL, (2,)),
    "all processes, with the memory of two hosts that are no peers": _Killed(_ALL, (0, 2)),
    "all processes, by SIGTERM and five seconds later": _Killed(terminates=True),
    "all processes, by SIGTERM, and then all hosts with their memory": _Killed((), _ALL, True),
    "one process and its peer, with the memory of both hosts": _Killed((1, 2), (1, 2)),
}


def _lost_job(killed: _Killed, root: Path, memory: Path) -> Loss:
    with _job(root, memory) as (job, output):
        processes = [int(each) for each in _read_to(output, "processes")]
        _read_to(output, f"step {KILLED_AT}")
        began = time.perf_counter()
        for number in killed.processes:
            os.kill(processes[number], signal.SIGKILL)
        if not killed.terminates:
            _lose(memory, killed.hosts)
            start = int(_read_to(output, "resumed at step")[-1])
            return KILLED_AT + 1 - start, time.perf_counter() - began
        job.terminate()
        # Until the agents have closed it, too.
        rest = output.read()
        _lose(memory, killed.hosts)
    last = max([KILLED_AT, *(int(each[5:]) for each in rest.split("\n") if each[:5] == "step ")])
    began = time.perf_counter()
    with _job(root, memory) as (_, output):
        start = int(_read_to(output, "resumed at step")[-1])
        # It has made steps, and taken snapshots, after the last one that it told.
        return max(last + 1 - start, 0), time.perf_counter() - began


def _lose(memory: Path, hosts: Sequence[int]) -> None:
    for number in hosts:
        shutil.rmtree(memory / f"host-{number}", ignore_errors=True)


def _job(root: Path, memory: Path) -> Any:
    options = ["--root", root, "--hosts", memory, "--processes", PROCESSES, "--steps", NEVER]
    return _running(PROGRAM, *options, "--save-every", SAVE_EVERY)


def _read_to(output: IO[str], start: str) -> list[str]:
    """Returns the words of the next line that begins so, after that."""
    for line in output:
        if line.startswith(start):
            return line.removeprefix(start).split()
    raise AssertionError(f"the job has ended without {start!r}")
