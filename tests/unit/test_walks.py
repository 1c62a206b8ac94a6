"""The two walks of docs/design/000-map.md are those of the code: each function names the next."""

from __future__ import annotations

import ast
import itertools
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import jax.numpy as jnp
import pytest

import ckpt.sync
from tests.support.paths import ROOT
from tests.unit.test_architecture import FLOOR_OF, FLOORS, room_of

MAP = (ROOT / "docs" / "design" / "000-map.md").read_text(encoding="utf-8")
MOST_HOPS = {"save": 12, "restore": 10}
# A handler is handed a writer or a reader of the engine: the one call that goes up.
HANDLER = "handlers"


def walk(name: str) -> list[tuple[str, str]]:
    """Return file and function of each stop of a walk; the last is a function of the system."""
    text = MAP.partition(f"<!-- walk: {name} -->")[2].partition("<!-- walk: end -->")[0]
    stops = re.findall(r"^\d+\. `([^`]+)`", text, re.MULTILINE)
    return [(file, function) for file, _, function in (stop.partition(": ") for stop in stops)]


def names_in(file: str, function: str) -> set[str]:
    """Return the names and attributes in the body of a function or method."""
    node: Any = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    for part in function.split("."):
        # Behind its overloads.
        node = [each for each in node.body if getattr(each, "name", None) == part][-1]
    inner = [each for statement in node.body for each in ast.walk(statement)]
    names = {each.id for each in inner if isinstance(each, ast.Name)}
    return names | {each.attr for each in inner if isinstance(each, ast.Attribute)}


@contextmanager
def functions_run() -> Iterator[set[tuple[str, str]]]:
    """Collect file and qualified name of every function of the package that is called."""
    found: set[tuple[str, str]] = set()
    package = f"{ROOT}/ckpt/"

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package):
            file = Path(code.co_filename).relative_to(ROOT).as_posix()
            found.add((file, code.co_qualname))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@pytest.mark.parametrize("name", MOST_HOPS)
def test_a_walk_is_short(name: str) -> None:
    hops = len(walk(name)) - 1
    assert 5 < hops <= MOST_HOPS[name]
    assert f"{hops} hops" in MAP


@pytest.mark.parametrize("name", MOST_HOPS)
def test_each_function_of_a_walk_names_the_next(name: str) -> None:
    stops = walk(name)
    for (file, function), following in itertools.pairwise(stops):
        called = (following[1] or following[0]).rpartition(".")[2]
        assert called in names_in(file, function), (file, function, called)


@pytest.mark.parametrize("name", MOST_HOPS)
def test_a_walk_only_goes_down(name: str) -> None:
    rooms = [room_of(file[:-3].replace("/", ".")) for file, _ in walk(name)[:-1]]
    assert rooms.count(HANDLER) == 1
    floors = [FLOOR_OF[room] for room in rooms if room != HANDLER]
    assert floors == sorted(floors, reverse=True)


def test_a_small_save_and_restore_go_the_walks(tmp_path: Path) -> None:
    state = {"w": jnp.arange(1024.0), "n": 3}
    with functions_run() as run, ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, state).result()
        mgr.restore(1)
    # The plain face stands in for the other, which has the same service behind it.
    for stop in [*walk("save")[1:-1], *walk("restore")[1:-1]]:
        assert stop in run, stop


def test_the_drawing_names_every_room() -> None:
    drawing = MAP.partition("```\n")[2].partition("\n```")[0]
    rooms = {room for floor in FLOORS for room in floor}
    words = set(re.findall(r"^ {2}([\w.]+)", drawing, re.MULTILINE))
    words |= {word.rstrip(",") for word in drawing.split()}
    finer = {room for room in rooms if room.rpartition(".")[0] == "_steps"}
    assert rooms - finer <= words
    assert {room.rpartition(".")[2] for room in finer} <= words | {"saves"}
