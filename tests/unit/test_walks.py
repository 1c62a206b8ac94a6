"""The two walks of docs/design/000-map.md have every frame of a save and a restore that is run."""

from __future__ import annotations

import itertools
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import anyio
import jax.numpy as jnp
import pytest

import ckpt
from tests.support.paths import ROOT
from tests.unit.test_architecture import FLOOR_OF, FLOORS, room_of

MAP = (ROOT / "docs" / "design" / "000-map.md").read_text(encoding="utf-8")
PACKAGE = f"{ROOT}/ckpt/"
# No walk gets longer.
MOST_FRAMES = {"save": 20, "restore": 23}
# What the frames of a walk go through on every floor: loops, tasks, threads.
GROUND = "_runtime"
# The steps up: a handler is handed a writer or a reader of the engine, and that writer the strategy
# of the job.
UP = {
    "save": [("handlers", "_engine.save"), ("_engine.save", "_job")],
    "restore": [("handlers", "_engine.restore")],
}

Edges = dict[tuple[str, str], str]


def walk(name: str) -> list[tuple[str, str]]:
    """Return how each frame of a walk is entered, and its name; the system's own call is last."""
    text = MAP.partition(f"<!-- walk: {name} -->")[2].partition("<!-- walk: end -->")[0]
    return re.findall(r"^\d+\. (?:(task|thread): )?`([^`]+)`", text, re.MULTILINE)


def label(code: CodeType) -> str:
    return f"{Path(code.co_filename).relative_to(ROOT).as_posix()}: {code.co_qualname}"


def is_own(code: CodeType) -> bool:
    return code.co_filename.startswith(PACKAGE)


def own(frame: FrameType | None) -> FrameType | None:
    """Return the next frame of the package, from this one outwards."""
    while frame is not None and not is_own(frame.f_code):
        frame = frame.f_back
    return frame


def code_of(function: Any) -> CodeType | None:
    while hasattr(function, "func"):
        function = function.func
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code if code is not None and is_own(code) else None


@contextmanager
def recorded() -> Iterator[Edges]:
    """Collect who called what in the package, and who started what in a task or a thread."""
    edges: Edges = {}

    def note(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "c_call" and is_own(code) and arg.__name__ in ("pwrite", "preadv"):
            edges.setdefault((label(code), f"os.{arg.__name__}"), "")
        if event != "call":
            return
        above = own(frame.f_back)
        if above is None:
            return
        started: list[tuple[str, Any]] = []
        if is_own(code):
            edges.setdefault((label(above.f_code), label(code)), "")
            if code.co_name == "schedule":
                started = [("thread", each) for each in frame.f_locals["args"]]
        elif code.co_name in ("start_soon", "start", "run_sync") and "func" in frame.f_locals:
            how = "thread" if code.co_name == "run_sync" else "task"
            started = [(how, frame.f_locals["func"])]
        for how, function in started:
            if (begun := code_of(function)) is not None:
                edges.setdefault((label(above.f_code), label(begun)), how)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield edges
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@pytest.mark.parametrize("name", MOST_FRAMES)
def test_a_walk_is_as_long_as_the_map_says(name: str) -> None:
    frames = walk(name)[:-1]
    entered = [how for how, _ in frames]
    tasks, threads = entered.count("task"), entered.count("thread")
    assert len(frames) <= MOST_FRAMES[name]
    assert f"{len(frames)} frames, of which {tasks} begin a task and {threads} a thread" in MAP


@pytest.mark.parametrize("name", MOST_FRAMES)
def test_a_walk_goes_up_only_where_it_is_meant_to(name: str) -> None:
    rooms = [room_of(stop.partition(".py")[0].replace("/", ".")) for _, stop in walk(name)[:-1]]
    rooms = [room for room in rooms if room != GROUND]
    steps = itertools.pairwise(rooms)
    assert [step for step in steps if FLOOR_OF[step[0]] < FLOOR_OF[step[1]]] == UP[name]


@pytest.mark.disk
@pytest.mark.parametrize("name", MOST_FRAMES)
def test_a_save_and_a_restore_go_the_walks(name: str, tmp_path: Path) -> None:
    state = {"w": jnp.arange(float(1 << 20)), "n": 3}

    async def save(step: int) -> None:
        async with ckpt.CheckpointManager(tmp_path) as mgr:
            await (await mgr.save(step, state))

    async def restore(step: int) -> None:
        async with ckpt.CheckpointManager(tmp_path) as mgr:
            await mgr.restore(step)

    anyio.run(save, 1)
    with recorded() as edges:
        if name == "save":
            anyio.run(save, 2)
        else:
            anyio.run(restore, 1)
    for (_, caller), (how, stop) in itertools.pairwise(walk(name)):
        assert edges.get((caller, stop)) == how, f"{caller} -> {how} {stop}"


def test_the_drawing_names_every_room() -> None:
    drawing = MAP.partition("```\n")[2].partition("\n```")[0]
    rooms = {room for floor in FLOORS for room in floor}
    assert rooms <= {word.strip(",;:") for word in drawing.split()}
