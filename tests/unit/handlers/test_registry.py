"""Which handler is taken: given ones, those by item name, installed ones, built-in ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt import errors
from ckpt.handlers import Deferred, ItemEntry, ItemReader, ItemWriter
from ckpt.handlers._registry import built_in, find_handlers
from tests.support.trees import plain_id


@dataclass
class Note:
    text: str


class Counter:
    def get_state(self) -> bytes:
        return b"1"

    def set_state(self, state: bytes) -> None:
        assert state == b"1"


class NoteHandler:
    """Saves notes, each under a heading."""

    def __init__(self, name: str = "note") -> None:
        self.name = name

    def accepts(self, item: Any) -> bool:
        return isinstance(item, Note)

    async def stage(self, item: Note, writer: ItemWriter) -> Awaitable[ItemEntry]:
        data = item.text.encode()

        async def commit() -> ItemEntry:
            await writer.write_file("note.txt", data)
            return ItemEntry(handler=self.name, nbytes=len(data))

        return Deferred(commit)

    async def load(self, entry: ItemEntry, like: Any, adapt: Any, reader: ItemReader) -> Any:
        return Note((await reader.read_file("note.txt")).decode())


def handler_of(path: Path, item: str) -> str:
    return json.loads((path / "ckpt.json").read_bytes())["items"][item]["handler"]


def test_given_handlers_are_asked_in_order_before_the_built_in_ones(tmp_path: Path) -> None:
    handlers = [NoteHandler("first"), NoteHandler("second")]
    ckpt.sync.save(tmp_path / "x", items={"note": Note("a"), "w": {"a": 1}}, handlers=handlers)
    assert handler_of(tmp_path / "x", "note") == "first"
    assert handler_of(tmp_path / "x", "w") == "pytree"
    found = ckpt.sync.load(tmp_path / "x", handlers=handlers)
    assert found == {"note": Note("a"), "w": {"a": 1}}


def test_a_handler_that_is_not_here_is_named_and_the_rest_can_be_read(tmp_path: Path) -> None:
    items = {"note": Note("a"), "w": {"a": 1}}
    ckpt.sync.save(tmp_path / "x", items=items, handlers=[NoteHandler()])
    with pytest.raises(errors.UnsupportedFormatError, match="'note', which is not here") as caught:
        ckpt.sync.load(tmp_path / "x")
    assert caught.value.item == "note"
    assert ckpt.sync.load(tmp_path / "x", items=["w"]) == {"w": {"a": 1}}
    assert "note" in str(ckpt.sync.metadata(tmp_path / "x"))


def test_a_mapping_chooses_by_item_name_for_manager_and_calls(tmp_path: Path) -> None:
    handlers = {"note": NoteHandler()}
    with ckpt.sync.CheckpointManager(tmp_path / "run", handlers=handlers) as mgr:
        mgr.save(0, items={"note": Note("a")}).result()
        assert mgr.restore()["note"] == Note("a")
        with pytest.raises(errors.UnsupportedLeafError, match="Note"):
            mgr.save(1, items={"other": {"of": Note("a")}})
    # Of an item that another handler wrote, the name on disk decides.
    ckpt.sync.save(tmp_path / "x", items={"note": {"a": 1}})
    assert ckpt.sync.load(tmp_path / "x", handlers=handlers)["note"] == {"a": 1}


@pytest.mark.parametrize(
    ("handlers", "words"),
    [
        ("json", "list of handlers"),
        (3, "list of handlers"),
        (NoteHandler(), "list of handlers"),
        ([NoteHandler], "is a class"),
        ([object()], "no method accepts"),
        ({"note": None}, "no method accepts"),
        ([NoteHandler("")], "name"),
        ([NoteHandler("a/b")], "name"),
        ([NoteHandler(3)], "name"),  # type: ignore[arg-type]
    ],
    ids=plain_id,
)
def test_what_is_no_handler_is_refused(handlers: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=words):
        ckpt.sync.CheckpointManager(tmp_path, handlers=handlers)
    with pytest.raises(errors.InvalidArgumentError, match=words):
        ckpt.sync.save(tmp_path / "x", {"a": 1}, handlers=handlers)


def test_trees_come_last_and_take_everything_else() -> None:
    found = find_handlers(())
    names = [handler.name for handler in (*built_in(), *found.trees)]
    assert sorted(names) == sorted(set(names))
    for item in ("text", np.random.default_rng(0), Note("a"), Counter()):
        assert found.for_item("item", item).name != "pytree"
    for tree in ({"text": "text"}, [Counter()], (), None, np.zeros(2), 1.0, object()):
        assert found.for_item("item", tree).name == "pytree"


PLUGIN = """
from dataclasses import dataclass
from ckpt.handlers import Deferred, ItemEntry

@dataclass
class Disc:
    data: bytes

class DiscHandler:
    name = "disc"
    def accepts(self, item):
        return isinstance(item, Disc)
    async def stage(self, item, writer):
        async def commit():
            await writer.write_file("disc", item.data)
            return ItemEntry(handler=self.name)
        return Deferred(commit)
    async def load(self, entry, like, adapt, reader):
        return Disc(await reader.read_file("disc"))

class Impostor(DiscHandler):
    name = "pytree"

def broken():
    raise RuntimeError("no licence")
"""
POINTS = """[ckpt.handlers]
disc = plugin:DiscHandler
absent = nothing_like_this:Handler
broken = plugin:broken
impostor = plugin:Impostor
nothing = plugin:PLUGIN
"""


def test_installed_handlers_are_found_and_broken_ones_named(tmp_path: Path) -> None:
    """A real distribution on the path; one import of it, and no crash."""
    site = tmp_path / "site"
    (site / "plugin-1.0.dist-info").mkdir(parents=True)
    (site / "plugin.py").write_text(PLUGIN)
    (site / "plugin-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n"
    )
    (site / "plugin-1.0.dist-info" / "entry_points.txt").write_text(POINTS)
    program = """
import logging, sys
logging.basicConfig(format="%(message)s")
import ckpt, ckpt.sync
assert "plugin" not in sys.modules
ckpt.sync.save(sys.argv[1], {"a": 1})
import plugin
ckpt.sync.save(sys.argv[2], plugin.Disc(b"x"))
assert ckpt.sync.load(sys.argv[2]) == plugin.Disc(b"x")
assert ckpt.sync.load(sys.argv[1]) == {"a": 1}
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "x"), str(tmp_path / "y")],
        env=os.environ | {"PYTHONPATH": f"{Path(ckpt.__file__).parents[1]}{os.pathsep}{site}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "that is installed" in line]
    assert [line.split("'")[1] for line in lines] == ["absent", "broken", "impostor", "nothing"]
    assert "no licence" in lines[1]
    assert "named 'pytree' already" in lines[2]
