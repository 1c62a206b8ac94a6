"""Several processes on one bucket: one wins, who dies harms nobody, evaluators see whole steps."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
import ckpt.sync
from tests.stores.fault_proxy import Fault, Seen
from tests.stores.places import Place
from tests.stores.use_store import SIZE, state

CHILD = Path(__file__).with_name("use_store.py")
STEPS = range(10)
PATIENCE_S = 120
ALL = "CKPT_ALL_STORES" in os.environ

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not ALL, reason="takes its time: nox -s stores runs it"),
]


@contextlib.contextmanager
def child(how: str, root: Any, *more: str) -> Iterator[subprocess.Popen[str]]:
    described = json.dumps([type(root).__name__, asdict(root)])
    with subprocess.Popen(
        [sys.executable, str(CHILD), how, described, *more],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ) | {"JAX_PLATFORMS": "cpu"},
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def ask(process: subprocess.Popen[str], line: object) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("kind", ["gcs", "seaweed"])
def test_of_two_processes_that_save_the_same_steps_one_wins_each(
    kind: str, make_place: Callable[[str], Place]
) -> None:
    bucket = make_place(kind)
    root = bucket.root("run")
    with child("races", root, "a") as a, child("races", root, "b") as b:
        won: dict[int, str] = {}
        for step in STEPS:
            for process in (a, b):
                ask(process, step)
            results = {"a": answer(a), "b": answer(b)}
            assert sorted(results.values()) == ["taken", "won"], (step, results)
            won[step] = next(name for name, result in results.items() if result == "won")
        for process in (a, b):
            assert process.stdin is not None
            process.stdin.close()
            assert answer(process) == str(list(STEPS))
    with ckpt.sync.CheckpointManager(root, mode="r") as mgr:
        for step, name in won.items():
            found = mgr.restore(step)
            assert (found["name"], found["step"]) == (name, step)
            assert np.array_equal(found["w"], np.full(SIZE, step))
            assert mgr.verify(step).ok
    left = [key for key in bucket.objects() if "/.ckpt-attempts/" in key]
    assert left == [], "leases are left"


@pytest.mark.parametrize(("kind", "first"), [("gcs", 0), ("moto", 3)])
def test_a_writer_that_is_killed_harms_nobody(
    kind: str, first: int, make_place: Callable[[str], Place]
) -> None:
    place = make_place(kind)
    assert place.proxy is not None
    dry, _ = _save_by_child(place, "dry", None)
    for number in range(first, len(dry), 6):
        name = f"run-{number}"
        _, saved = _save_by_child(place, name, number)
        with ckpt.sync.CheckpointManager(
            place.root(name), timeouts=ckpt.Timeouts(lease=1.0)
        ) as mgr:
            steps = mgr.all_steps()
            assert steps in ([1], [1, 2]), dry[number]
            assert not saved or steps == [1, 2]
            for step in steps:
                found = mgr.restore(step)
                assert np.array_equal(found["w"], np.full(SIZE, step)), dry[number]
                assert mgr.verify(step).ok
            if 2 in steps or not _may_commit(place, name):
                _wait_until_clean(place, name, mgr, steps)


def _may_commit(place: Place, name: str) -> bool:
    """Whether a manifest may still be on its way, so that nothing of its attempt is removed."""
    return any(
        key.startswith(f"{name}/.ckpt-attempts/") and b"committing" in data
        for key, data in place.objects().items()
    )


def _save_by_child(place: Place, name: str, number: int | None) -> tuple[list[Seen], bool]:
    """Let a child save step 2, and kill it at one of its requests, which is never answered."""
    assert place.proxy is not None
    proxy, root = place.proxy, place.root(name)
    with ckpt.sync.CheckpointManager(root) as mgr:
        mgr.save(1, state("before", 1)).result()
    reached = threading.Event()

    def plan(seen: Seen) -> Fault | None:
        if seen.number != number:
            return None
        reached.set()
        # Every second one is carried out, and the writer never hears of it.
        return "lost" if number % 4 else "hung"

    with child("saves", root, "2") as process:
        proxy.forget()
        proxy.plan = plan
        ask(process, "go")
        if number is None:
            assert answer(process) == "saved"
        else:
            assert reached.wait(PATIENCE_S)
        process.kill()
        saved = answer(process) == "saved"
        log = list(proxy.log)
    proxy.forget()
    return log, saved


def _wait_until_clean(
    place: Place, name: str, mgr: ckpt.sync.CheckpointManager, steps: list[int]
) -> None:
    """Every save cleans up; what the dead writer left goes once its lease has run out."""
    number, deadline = 100, time.monotonic() + PATIENCE_S
    while left := _strangers(place, name):
        assert time.monotonic() < deadline, f"left behind: {left}"
        mgr.save(number, {"x": number}).result()
        mgr.delete(number)
        number += 1
    assert mgr.all_steps() == steps


def _strangers(place: Place, name: str) -> list[str]:
    """Objects below the root that belong to no committed step."""
    below = {
        key.removeprefix(f"{name}/"): data
        for key, data in place.objects().items()
        if key.startswith(f"{name}/")
    }
    folders = {
        f"{key.split('/')[0]}/{json.loads(data)['attempt']}/"
        for key, data in below.items()
        if key.count("/") == 1 and key.endswith("/ckpt.json")
    }
    return [
        key
        for key in below
        if not key.endswith("/ckpt.json")
        and not key.startswith((*folders, "metadata/", ".ckpt-steps/"))
    ]


@pytest.mark.parametrize("kind", ["gcs", "seaweed"])
def test_an_evaluator_restores_every_step(kind: str, make_place: Callable[[str], Place]) -> None:
    root = make_place(kind).root("run")
    with (
        ckpt.sync.CheckpointManager(root, keep=ckpt.keep.Latest(1)) as mgr,
        child("watches", root) as evaluator,
    ):
        for step in (1, 2, 3, 4):
            mgr.save(step, state("trainer", step)).result()
        mgr.save(99, state("trainer", 99)).result()
        seen: list[Any] = []
        while not seen or seen[-1][0] != 99:
            line = answer(evaluator)
            assert line, f"the evaluator ended after {seen}"
            seen.append(tuple(map(int, line.split())))
        assert [step for step, *_ in seen] == sorted({step for step, *_ in seen})
        assert all(found == (found[0], found[0], found[0] * SIZE) for found in seen)
        mgr.wait_until_finished()
