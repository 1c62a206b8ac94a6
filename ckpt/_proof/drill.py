"""The drill: a program is killed and resumed, and has to repeat what it does without a kill.

1  runs to the last step, in a scratch root
2  begins again in another scratch root, and is killed at a random moment after a checkpoint
3  is started again, and resumes; 2 and 3 are repeated for more kills
4  the marks of all runs are compared with those of the first one
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from ckpt._arguments import invalid, whole_number
from ckpt._format.manifest_head import FILE_NAME
from ckpt._proof.drill_root import LAST_VARIABLE
from ckpt._proof.mark_notes import FOLDER, decode_marks
from ckpt._proof.state_marks import StateMark
from ckpt._proof.verdicts import Repetition
from ckpt.errors import CheckpointError, CorruptCheckpointError
from ckpt.manifest import decode
from ckpt.storage._scratch import ROOT_VARIABLE

_POLL_S = 0.02
_MOST_OUTPUT = 2000
_NO_MARK = "has made no mark (call mgr.mark(step, state) at the beginning of each step)"
_DEVICES_FLAG = "--xla_force_host_platform_device_count"
# The marks of a root: of each run in the order of their begin, by step.
_Runs = list[dict[int, StateMark]]


class DrillReport(Struct, frozen=True):
    """What a drill has found.

    Attributes:
        steps: First and last step that were compared after a resume.
        kills: For each kill, the last step that was marked before it, and the first one after the
            resume.
        devices: Number of devices of each resumed run; 0 is that of the first run.
        how: How well the steps were repeated.
        difference: The first difference that is more than rounding, as text; None if there is none.
        step: The step of the difference.
        leaves: The leaves that differ there, those with the greatest distance first.
        is_repeatable: False if two runs from the beginning differ already, without a resume.
    """

    steps: tuple[int, int]
    kills: Sequence[tuple[int, int]]
    devices: Sequence[int]
    how: str
    difference: str | None = None
    step: int | None = None
    leaves: Sequence[str] = ()
    is_repeatable: bool = True

    @property
    def ok(self) -> bool:
        """True if the program resumes as if it had not been killed."""
        return self.difference is None

    def __str__(self) -> str:
        lines = [
            f"killed after step {last}, resumed before step {first}"
            + (f", told to use {count} devices" if count else "")
            for (last, first), count in zip(self.kills, self.devices, strict=True)
        ]
        if self.difference is None:
            lines.append(f"steps {self.steps[0]} to {self.steps[1]} were repeated {self.how}")
        else:
            lines.append(self.difference)
        if not self.is_repeatable:
            lines.append(
                "two runs from the beginning differ already, so nothing is known of the resume: "
                "give the program fixed seeds"
            )
        return "\n".join(lines)


class _Drill(Struct):
    """A drill under way.

    Attributes:
        command: The program, with its arguments.
        scratch: The folder of the scratch roots, and of the output of the program.
        last: The last step to compare.
        timeout: Seconds that each run may take.
        was_killed: True if the latest run was killed, and had not ended by itself.
    """

    command: Sequence[str]
    scratch: Path
    last: int
    timeout: float
    was_killed: bool = False

    def run(self, name: str, until: Callable[[Path, _Runs], bool], devices: int = 0) -> _Runs:
        """Run the program in a scratch root until something is so, or until it ends.

        Args:
            name: Name of the scratch root.
            until: Gets the folder and the marks of all runs there; True kills the program.
            devices: Number of devices; 0 for those that it has by itself.

        Raises:
            CheckpointError: The program has failed, or has made no mark in time.
        """
        top = self.scratch / name
        top.mkdir(parents=True, exist_ok=True)
        before = len(_marks_in(top))
        log = self.scratch / f"{name}-{before}.log"
        deadline = time.monotonic() + self.timeout
        with log.open("wb") as output:
            try:
                # In a session of its own, so that the kill takes its children, too.
                program = subprocess.Popen(
                    self.command,
                    env=self._environment(top, devices),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise invalid("command", self.command[0], f"a program ({error})") from error
            is_killed = False
            try:
                while program.poll() is None:
                    runs = _marks_in(top)[before:]
                    if runs and until(top, runs):
                        is_killed = True
                        break
                    if time.monotonic() > deadline:
                        what = f"did not come to step {self.last}" if runs else _NO_MARK
                        raise CheckpointError(
                            f"the program {what} in {self.timeout:.0f} s{_said(log)}"
                        )
                    time.sleep(_POLL_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(program.pid, signal.SIGKILL)
                status = program.wait()
                self.was_killed = is_killed and status == -signal.SIGKILL
        if status and not is_killed:
            raise CheckpointError(f"the program ended with status {status}{_said(log)}")
        runs = _marks_in(top)
        if len(runs) == before:
            raise CheckpointError(f"the program {_NO_MARK}{_said(log)}")
        return runs

    def _environment(self, top: Path, devices: int) -> dict[str, str]:
        known = {**os.environ, ROOT_VARIABLE: str(top), LAST_VARIABLE: str(self.last)}
        if devices:
            flags = known.get("XLA_FLAGS", "").split()
            others = [flag for flag in flags if not flag.startswith(_DEVICES_FLAG)]
            known["XLA_FLAGS"] = " ".join([*others, f"{_DEVICES_FLAG}={devices}"])
            visible = known.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(devices)))
            known["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[:devices])
        return known


def drill(
    command: Sequence[str],
    *,
    steps: int = 20,
    kills: int = 1,
    devices: Sequence[int] = (),
    seed: int | None = None,
    timeout: float = 600.0,
    scratch: Path | None = None,
    tell: Callable[[str], Any] = lambda _: None,
) -> DrillReport:
    """Run a program without a kill and with kills, and compare the marks of its steps.

    All that it saves with this library goes to scratch folders, and nothing to its own places. A
    place is read where it is until the program has written to it in the drill. Files that the
    program writes itself go where they always do.

    Args:
        command: The program, with its arguments.
        steps: The last step to compare. `CKPT_DRILL_LAST_STEP` tells it to the program.
        kills: How many times it is killed and resumed.
        devices: Number of devices for each resume: there are as many kills, then.
        seed: Seed of the moments of the kills.
        timeout: Seconds that each run may take.
        scratch: An empty folder for scratch roots and output, which stays. None takes one that is
            removed at the end.
        tell: Is told of each run.

    Raises:
        InvalidArgumentError: An argument is invalid.
        CheckpointError: The program fails, makes no marks, or saves nothing before the last step.
    """
    whole_number("steps", steps, least=2)
    counts = list(devices) or [0] * whole_number("kills", kills, least=1)
    for count in devices:
        whole_number("devices", count, least=1)
    if kills not in (1, len(counts)):
        raise invalid("kills", kills, f"{len(devices)}, one for each number of devices, or 1")
    if not command:
        raise invalid("command", command, "a program and its arguments")
    if scratch is not None and scratch.exists() and any(scratch.iterdir()):
        raise invalid("scratch", str(scratch), "a folder that is empty, or that is not there yet")
    with (
        _ended_by_signals(),
        tempfile.TemporaryDirectory(prefix="ckpt-drill-", ignore_cleanup_errors=True) as made,
    ):
        # Its real path, since the program may change its working directory and follow links.
        run = _Drill(list(command), Path(os.path.realpath(scratch or made)), steps, timeout)
        try:
            return _drilled(run, counts, random.Random(seed), tell)
        finally:
            _end_all(run.scratch)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM end the body like Ctrl-C, so that no program is left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_all(scratch: Path) -> None:
    """Kill what programs have left behind, such as agents that still copy steps.

    They are in sessions of their own, and known by the scratch root in their environment.
    """
    mine = f"{ROOT_VARIABLE}={scratch}/".encode()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        # Processes end meanwhile, and those of others cannot be read.
        with contextlib.suppress(OSError):
            if mine in environ.read_bytes():
                os.kill(int(environ.parent.name), signal.SIGKILL)


def _drilled(
    run: _Drill, counts: Sequence[int], rng: random.Random, tell: Callable[[str], Any]
) -> DrillReport:
    times: list[float] = []

    def is_done(_: Path, runs: _Runs) -> bool:
        times.append(time.monotonic())
        return max(runs[-1]) >= run.last

    whole = run.run("whole", is_done)[-1]
    last = min(max(whole), run.last)
    saved = min(_committed(run.scratch / "whole"), default=last)
    if saved >= last - 1:
        raise CheckpointError(
            f"the program saved nothing before step {last - 1}: save more often, or drill more "
            "steps"
        )
    tell(f"ran steps {min(whole)} to {last} without a kill, and saved step {saved} first")
    # A short program may have ended before anybody looked.
    step_seconds = (times[-1] - times[0]) / len(whole) if times else 0.0
    kills = []
    for number, devices in enumerate([0, *counts[:-1]]):
        target, delay = rng.randint(saved + 1, (saved + last + 1) // 2), rng.random()

        def is_there(top: Path, runs: _Runs, target: int = target, delay: float = delay) -> bool:
            if max(runs[-1]) < target or not _committed(top):
                return False
            time.sleep(delay * step_seconds)
            return True

        runs = run.run("killed", is_there, devices)
        kills.append(max(runs[-1]))
        if not run.was_killed:
            raise CheckpointError(
                f"the program ended before it could be killed, after step {kills[-1]}: let it "
                "run more steps than are drilled, or longer ones"
            )
        tell(f"killed it after step {kills[-1]} ({number + 1} of {len(counts)})")
    return _report(whole, run.run("killed", is_done, counts[-1]), kills, counts, last)


def _report(
    whole: dict[int, StateMark],
    runs: _Runs,
    kills: Sequence[int],
    devices: Sequence[int],
    last: int,
) -> DrillReport:
    """Return what the marks of the killed runs, and of the last one, say."""
    begins = [min(marks) for marks in runs[1:]]
    how, compared = "exactly", list[int]()
    for number, marks in enumerate(runs):
        repetition = Repetition(dict(whole))
        for step in sorted(marks):
            repetition.compare(marks[step])
        how = repetition.how if repetition.rounding is not None else how
        compared += marks.keys() & whole.keys() if number else []
        found = repetition.found
        if found is not None:
            return DrillReport(
                (found.step, found.step),
                list(zip(kills, begins, strict=True)),
                devices,
                how,
                str(found),
                found.step,
                found.leaves,
                is_repeatable=number > 0,
            )
    problem = None
    if min(begins) <= min(whole):
        problem = f"the program began again at step {min(begins)}: it does not resume"
    elif not compared:
        problem = f"the program went on at step {max(begins)}, after the last: drill more steps"
    elif max(compared) < min(last, max(whole)):
        problem = f"the resumed program ended after step {max(compared)}, before step {last}"
    steps = (min(compared, default=0), max(compared, default=0))
    return DrillReport(steps, list(zip(kills, begins, strict=True)), devices, how, problem)


def _marks_in(top: Path) -> _Runs:
    """Return the marks in scratch roots; notes that are written just now are left out."""
    runs: dict[str, dict[int, StateMark]] = {}
    folders = [path / FOLDER for path in _folders(top) if (path / FOLDER).exists()]
    if len(folders) > 1:
        raise CheckpointError(
            f"several managers of the program make marks, in {folders[0].parent} and "
            f"{folders[1].parent}: let one of them do so"
        )
    for path in sorted(note for folder in folders for note in folder.iterdir()):
        with contextlib.suppress(CorruptCheckpointError, FileNotFoundError):
            marks = {mark.step: mark for mark in decode_marks(path.read_bytes(), str(path))}
            runs.setdefault(path.name.partition("-")[2], {}).update(marks)
    return [marks for marks in runs.values() if marks]


def _folders(top: Path) -> Iterator[Path]:
    """Yield the scratch folders; of a step, only its own."""
    for path, names, files in os.walk(top):
        yield Path(path)
        if FILE_NAME in files:
            names.clear()


def _committed(top: Path) -> list[int]:
    """Return the committed steps in scratch roots."""
    found = []
    for path in (each / FILE_NAME for each in _folders(top) if "-tmp-" not in each.name):
        # Most folders are no steps, and a step may be deleted meanwhile.
        with contextlib.suppress(FileNotFoundError):
            found.append(decode(path.read_bytes(), where=str(path)).step)
    return [step for step in found if step is not None]


def _said(log: Path) -> str:
    """Return the end of the output of a program, for a message."""
    text = log.read_text(errors="replace").strip()[-_MOST_OUTPUT:]
    return f". Its last output:\n{text}" if text else ", and printed nothing"
