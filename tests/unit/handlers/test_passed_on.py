"""Handlers that pass everything on to a built-in one, and one that does all by itself."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import numpy as np
import pytest
from google.protobuf.struct_pb2 import Struct
from google.protobuf.wrappers_pb2 import StringValue

import ckpt
import ckpt.sync
from ckpt.errors import TargetMismatchError
from ckpt.handlers import (
    BytesHandler,
    Deferred,
    Handler,
    ItemEntry,
    ItemReader,
    ItemWriter,
    JsonHandler,
    LeafType,
    ProtobufHandler,
    PyTreeHandler,
    RandomStateHandler,
    StatefulHandler,
)


class PassedOn:
    """Does what another handler does, under its name."""

    def __init__(self, inner: Handler) -> None:
        self.inner, self.name, self.calls = inner, inner.name, list[str]()

    def accepts(self, item: Any) -> bool:
        return self.inner.accepts(item)

    async def stage(self, item: Any, writer: ItemWriter) -> Awaitable[ItemEntry]:
        self.calls.append("stage")
        return await self.inner.stage(item, writer)

    async def load(self, entry: ItemEntry, like: Any, adapt: ckpt.Adapt, reader: ItemReader) -> Any:
        self.calls.append("load")
        return await self.inner.load(entry, like, adapt, reader)


class Counter:
    """An object with a state."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def told(item: Any) -> Any:
    """What there is to compare of an item."""
    match item:
        case np.random.Generator():
            return item.bit_generator.state
        case Counter():
            return item.count
        case _:
            return item


@dataclass
class Settings:
    rate: float


# The handler, what it takes with a target for it, and what it does not take.
CASES: dict[str, tuple[Any, Any, Any, Any]] = {
    "json": (JsonHandler(), Settings(0.5), Settings, {"rate": 0.5}),
    "bytes": (BytesHandler(), "by hand", None, 3),
    "random_state": (RandomStateHandler(), np.random.default_rng(3), np.random.default_rng(), 3),
    "protobuf": (ProtobufHandler(), StringValue(value="x"), StringValue(), "x"),
    "stateful": (StatefulHandler(), Counter(5), Counter(0), 5),
    "pytree": (PyTreeHandler(), {"w": 1.5}, {"w": 0.0}, len),
}


@pytest.mark.parametrize("name", CASES)
def test_of_a_built_in_one(name: str, tmp_path: Path) -> None:
    inner, item, like, foreign = CASES[name]
    assert inner.name == name
    assert (inner.accepts(item), inner.accepts(foreign)) == (True, False)
    handler = PassedOn(inner)
    ckpt.sync.save(tmp_path / "x", items={"thing": item}, handlers={"thing": handler})
    found = ckpt.sync.load(tmp_path / "x", items={"thing": like}, handlers={"thing": handler})
    assert told(found["thing"]) == told(item)
    assert handler.calls == ["stage", "load"]


def test_what_each_takes_is_chosen_by_itself() -> None:
    assert ckpt.handlers.BytesHandler().accepts(b"x")
    assert not ckpt.handlers.BytesHandler().accepts(["x"])


def test_each_process_has_a_state_of_its_own() -> None:
    assert RandomStateHandler().per_process
    assert StatefulHandler().per_process


def test_a_target_of_another_kind_is_refused(tmp_path: Path) -> None:
    handlers = {"thing": PassedOn(ProtobufHandler())}
    ckpt.sync.save(tmp_path / "x", items={"thing": StringValue(value="x")}, handlers=handlers)
    with pytest.raises(TargetMismatchError, match="thing"):
        ckpt.sync.load(tmp_path / "x", items={"thing": Struct()}, handlers=handlers)


class Logbook:
    """Text in a file, with an array beside it, and what the job was."""

    name = "logbook"

    def accepts(self, item: Any) -> bool:
        return isinstance(item, dict) and "text" in item

    async def stage(self, item: Any, writer: ItemWriter) -> Awaitable[ItemEntry]:
        job = [writer.process, writer.processes]
        text = await writer.in_thread(str.encode, item["text"])
        await writer.stage({"w": item["w"]}, formatted=False)

        async def commit() -> ItemEntry:
            await writer.write_file("pages/first.txt", text)
            return ItemEntry(handler=self.name, data={"job": job})

        return Deferred(commit)

    async def load(self, entry: ItemEntry, like: Any, adapt: ckpt.Adapt, reader: ItemReader) -> Any:
        text = await reader.read_file("pages/first.txt")
        tree = await PyTreeHandler().load(entry, None, adapt, reader)
        return {
            "text": await reader.in_thread(bytes.decode, text),
            "w": tree["w"],
            "read": [reader.item, reader.process, reader.processes],
            "saved": entry.data,
        }


def test_of_ones_own(tmp_path: Path) -> None:
    w = np.zeros((64, 64), np.float32)
    handlers = {"log": Logbook()}
    ckpt.sync.save(
        tmp_path / "x",
        items={"log": {"text": "day one", "w": w}},
        handlers=handlers,
        formats=lambda *_: ckpt.ArrayFormat(compression=ckpt.Zstd(1)),
    )
    assert (tmp_path / "x" / "log" / "pages" / "first.txt").read_text() == "day one"
    found = ckpt.sync.load(tmp_path / "x", handlers=handlers)["log"]
    assert (found["text"], found["read"]) == ("day one", ["log", 0, 1])
    assert found["saved"] == {"job": [0, 1]}
    assert np.array_equal(found["w"], w)
    # It is stored as it is, whatever the formats say.
    du = max(each.stat().st_size for each in (tmp_path / "x" / "log" / "d").iterdir())
    assert du >= w.nbytes


def test_a_mean_of_ones_own(tmp_path: Path) -> None:
    handlers = {"log": Logbook()}
    weights = {}
    for number in (1, 3):
        log = {"text": f"day {number}", "w": np.full((4, 4), number, np.float32)}
        ckpt.sync.save(tmp_path / f"{number}", items={"log": log}, handlers=handlers)
        weights[tmp_path / f"{number}"] = number / 4
    found = ckpt.sync.merge(weights, handlers=handlers)["log"]
    assert found["text"] == "day 3"


def test_what_is_deferred_begins_when_it_is_awaited_or_is_dropped() -> None:
    calls: list[str] = []

    async def begin() -> int:
        calls.append("begun")
        return 5

    async def main() -> int:
        return await Deferred(begin, lambda: calls.append("dropped"))

    dropped: Deferred[int] = Deferred(begin, lambda: calls.append("dropped"))
    dropped.close()
    dropped.close()
    assert calls == ["dropped"]
    assert anyio.run(main) == 5
    assert calls == ["dropped", "begun"]


@dataclass
class Money:
    cents: int


@dataclass
class Wallet:
    money: Money


def test_of_leaf_types_and_classes(tmp_path: Path) -> None:
    money = LeafType(Money, pack=lambda each: each.cents, unpack=Money, name="money")
    assert (money.cls, money.name) == (Money, "money")
    handler = PyTreeHandler(leaf_types=[money])
    assert (handler.packs(Money(1)), handler.packs(1)) == (True, False)
    ckpt.sync.save(tmp_path / "x", {"a": Money(5)}, handlers=[handler])
    assert ckpt.sync.load(tmp_path / "x", handlers=[handler]) == {"a": Money(5)}

    class Local(NamedTuple):
        a: int

    ckpt.sync.save(tmp_path / "y", {"point": Local(3)})
    found = ckpt.sync.load(tmp_path / "y", handlers=[PyTreeHandler(classes=[Local])])
    assert type(found["point"]) is Local
    # It is not found by its name.
    assert type(ckpt.sync.load(tmp_path / "y")["point"]) is ckpt.types.UnknownNode
