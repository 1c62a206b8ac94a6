"""Campaigns of jobs of several processes in which one is killed, stopped, or meets an error.

What is promised: every other process raises an error that names it, within the time limit and a
little; nothing is half visible, and no committed step is lost; a job of another size goes on from
there, and removes what the dead have left.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import ckpt.sync
from tests.reliability.kills import attempts
from tests.reliability.tally import Tally
from tests.support.real_jobs import Job, started

__all__ = ["errors", "kills", "stops"]

LIMIT = 3.0
# All raise within the limit and 2 seconds, on a machine at leisure.
GRACE = 6.0
PATIENCE_S = 120.0

Said = dict[str, Any]

STAGES = ("begin", "stage", "write", "report")
# Only the primary comes to these.
OF_PRIMARY = ("manifest", "decide", "publish")


def at_stages(what: str, count: int, *, before: bool = True, late: bool = True) -> list[str]:
    """Return scenarios in which a save meets `what` at every stage, in the first and the last."""
    early = ("before", *STAGES) if before else STAGES
    found = [f"{what}:save:{stage}:{who}" for stage in early for who in (0, count - 1)]
    return found + [f"{what}:save:{stage}:0" for stage in OF_PRIMARY if late]


def said_of(job: Job, index: int, scenario: str) -> Said:
    """Wait for what one process says of one scenario; it may have been ended by jax instead."""

    def found(lines: list[str]) -> bool:
        return any(f'"{scenario}"' in line for line in lines)

    job[index].wait_for(found, f"nothing of {scenario}", PATIENCE_S)
    return next(each for each in job[index].values if each["scenario"] == scenario)


def committed(root: Path) -> set[int]:
    names = [each.parent.name for each in root.glob("*/ckpt.json")]
    return {int(name) for name in names if name.isdecimal()}


def play(root: Path, count: int, scenarios: Sequence[str]) -> Tally:
    """Let a job make one call after the other, and something go wrong in each."""
    tally = Tally()
    with started(count, "fail_in_job.py", root, LIMIT, *scenarios, timeout=600) as job:
        for index in range(count):
            first = said_of(job, index, "first")["step"]
        kept = committed(root)
        if first not in kept or attempts(root):
            tally.losses.append(f"the job began with {kept}, and {attempts(root)} was left")
        for scenario in scenarios:
            said = _meet(job, scenario)
            tally += _judged(scenario, said, count, root, kept)
            kept = committed(root)
        for line in _damaged(root):
            tally.losses.append(line)
    return tally


def _meet(job: Job, scenario: str) -> dict[int, Said]:
    """Do what the test has to do for a scenario; return what the processes say of it."""
    what, _, _, text = scenario.split("#")[0].split(":")
    who = int(text)
    others = [index for index in range(len(job)) if index != who]
    if what in ("kill", "stop"):
        job[who].reached(scenario, PATIENCE_S)
        for index in others:
            begun = f"begun {scenario}"
            job[index].wait_for(lambda lines, b=begun: b in lines, begun, PATIENCE_S)  # type: ignore[misc]
    if what == "kill":
        job[who].kill()
        ends = {index: _said_or_ended(job, index, scenario) for index in others}
        return {index: each for index, each in ends.items() if each is not None}
    if what == "stop":
        job[who].stop()
        said = {index: said_of(job, index, scenario) for index in others}
        job[who].resume()
        job[who].go_on()
        return said | {who: said_of(job, who, scenario)}
    return {index: said_of(job, index, scenario) for index in range(len(job))}


def _said_or_ended(job: Job, index: int, scenario: str) -> Said | None:
    """Wait for what one process says, or for its end: jax aborts those who miss the primary."""
    try:
        return said_of(job, index, scenario)
    except pytest.fail.Exception:
        # Raises if it still runs.
        job[index].process.wait(1)
        return None


def _judged(scenario: str, said: dict[int, Said], count: int, root: Path, kept: set[int]) -> Tally:
    """Compare what processes say of a scenario, and what is in the root, with the promise."""
    what, call, stage, text = scenario.split("#")[0].split(":")
    who, lost = int(text), []
    now = committed(root)
    step = next((each["step"] for each in said.values()), None)
    others = [each for index, each in sorted(said.items()) if index != who]
    fails = what not in ("none", "slow", "more", "late")
    if what in ("kill", "stop") and stage == "reported":
        # It has done its part, so nobody waits for it.
        fails = False
    if call != "delete" and kept - now:
        lost.append(f"steps {kept - now} are gone")
    own = said.get(who, {})
    # A primary that goes on may still come to an end of its own.
    counts = what != "fewer" and not (what == "stop" and who == 0)
    if own and counts and ("error" in own) != (fails or what == "more"):
        lost.append(f"process {who} has {own.get('error', 'no error')}: {own.get('message')}")
    for each in others:
        failed = "error" in each
        if failed != fails:
            lost.append(f"one has {each.get('error', 'no error')}: {each.get('message')}")
        elif failed:
            lost += _wrong_error(each, what, who, count)
        if fails and each["seconds"] > LIMIT + GRACE:
            lost.append(f"one waited {each['seconds']:.1f} s")
    if what == "slow" and any(each["seconds"] < LIMIT for each in others):
        lost.append("it was not slow")
    if fails and now - kept and not (what == "stop" and who == 0):
        lost.append(f"steps {now - kept} are there")
    if call == "save" and said:
        if not fails and step not in now:
            lost.append(f"step {step} is not there")
        if len({"error" in each for each in said.values()}) > 1 and what == "error":
            lost.append("not all have failed")
    # Who was killed may have been the one to remove it.
    if attempts(root) and not (what == "kill" and who == 0):
        lost.append(f"{attempts(root)} was left")
    met = what in ("kill", "stop", "fewer", "more") or stage == "before"
    met = met or bool(own.get("met"))
    return Tally(1, int(met), [f"{count} processes, {scenario}: {line}" for line in lost])


def _wrong_error(each: Said, what: str, who: int, count: int) -> Iterator[str]:
    """Yield what an error of another process lacks."""
    if f"process {who}" not in each["message"]:
        yield f"process {who} is not named: {each['message']}"
    # With the primary its service is silent, and some hear that of the service only.
    told = each["missing"] == [who] or (who == 0 and not each["missing"])
    if what in ("kill", "stop", "fewer") and not told:
        yield f"missing are {each['missing']}: {each['message']}"
    if what == "full" and each["errno"] != 27:
        yield f"errno {each['errno']}: {each['message']}"
    if what in ("error", "full", "cancel") and each["seconds"] > LIMIT and not each["missing"]:
        yield f"it took {each['seconds']:.1f} s to tell"


def _damaged(root: Path) -> Iterator[str]:
    with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
        for step in mgr.all_steps():
            report = mgr.verify(step)
            if not report.ok:
                yield f"step {step}: {report.problems[:3]}"


def errors(directory: Path, count: int, seed: int = 0) -> Tally:
    """Let a process of 2 and of 4 meet an error at every stage, and once be slow."""
    tally = Tally()
    for processes in (2, 4):
        scenarios = at_stages("error", processes)
        scenarios += at_stages("cancel", processes, before=False, late=False)
        scenarios += [f"full:save:stage:{who}" for who in (0, processes - 1)]
        scenarios += [f"late:save:conclude:{processes - 1}"]
        scenarios += [f"slow:save:write:{who}" for who in (0, processes - 1)]
        scenarios += [f"error:restore:{stage}:{who}" for stage in ("load",) for who in (0, 1)]
        scenarios += ["error:open:begin:1", "error:one:write:1", "error:async_save:write:0"]
        random.Random(seed).shuffle(scenarios)
        root = directory / f"{processes}"
        tally += play(root, processes, [*scenarios[:count], "none:save:x:0"])
    return tally


def stops(directory: Path, count: int, seed: int = 0) -> Tally:
    """Stop a process of 2 and of 4 at every stage, and let it go on when the others have raised."""
    tally = Tally()
    for processes in (2, 4):
        scenarios = at_stages("stop", processes)
        scenarios += [f"stop:{call}:load:{who}" for call in ("restore",) for who in (0, 1)]
        random.Random(seed).shuffle(scenarios)
        chosen = [
            each
            for number, scenario in enumerate(scenarios[:count])
            for each in (scenario, f"none:save:x:0#{number}")
        ]
        tally += play(directory / f"{processes}", processes, chosen)
    return tally


def kills(directory: Path, count: int, seed: int = 0) -> Tally:
    """Kill a process at every stage; the next job, of another size, goes on from there."""
    tally = Tally()
    sizes = itertools.cycle((2, 4))
    scenarios = [(n, each) for n in (2, 4) for each in at_stages("kill", n)]
    scenarios += [(n, f"kill:save:reported:{n - 1}") for n in (2, 4)]
    scenarios += [(n, "kill:restore:load:1") for n in (2, 4)]
    random.Random(seed).shuffle(scenarios)
    # In turn, so that every job goes on from one of the other size.
    scenarios.sort(key=lambda each: each[0])
    half = len(scenarios) // 2
    ordered = [
        each for pair in zip(scenarios[:half], scenarios[half:], strict=True) for each in pair
    ]
    for (processes, scenario), _ in zip(ordered[:count], sizes, strict=False):
        tally += play(directory / "root", processes, [scenario])
    return tally + play(directory / "root", 1, ["none:save:x:0"])
