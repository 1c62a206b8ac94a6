"""The conformance suite: every kind of bad handler is caught by the check that is about it."""

from __future__ import annotations

import operator
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import InvalidArgumentError, TargetMismatchError
from ckpt.handlers import Deferred, Handler, ItemEntry, ItemReader, ItemWriter
from ckpt.testing.conformance import HandlerCase, check_handler
from ckpt.testing.conformance import handlers as suite


def test_a_handler_has_to_offer_what_its_protocol_says() -> None:
    asked = {name for name in dir(Handler) if name[0] != "_"} | set(Handler.__annotations__)
    assert asked == {"accepts", "load", "name", "stage"}
    assert asked <= set(dir(BoxHandler))


class Box:
    def __init__(self, text: str) -> None:
        self.text = text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Box) and self.text == other.text

    __hash__ = None  # type: ignore[assignment]


class BoxHandler:
    """A good handler; the classes below spoil one thing each."""

    name = "box"

    def accepts(self, item: Any) -> bool:
        return isinstance(item, Box)

    def refuse_item(self, item: Any) -> None:
        if not isinstance(item, Box):
            raise InvalidArgumentError("no box")

    def refuse_target(self, like: Any) -> None:
        if like is not None and not isinstance(like, Box):
            raise TargetMismatchError("no box")

    async def stage(self, item: Box, writer: ItemWriter) -> Awaitable[ItemEntry]:
        self.refuse_item(item)
        text = item.text

        async def commit() -> ItemEntry:
            return await self.write(text, writer)

        return Deferred(commit)

    async def write(self, text: str, writer: ItemWriter) -> ItemEntry:
        await writer.write_file("box", text.encode())
        return ItemEntry(handler=self.name, nbytes=len(text))

    async def load(self, entry: ItemEntry, like: Any, adapt: Any, reader: ItemReader) -> Any:
        self.refuse_target(like)
        return Box((await reader.read_file("box")).decode())


class Late(BoxHandler):
    async def stage(self, item: Box, writer: ItemWriter) -> Awaitable[ItemEntry]:
        self.refuse_item(item)

        async def commit() -> ItemEntry:
            return await self.write(item.text, writer)

        return Deferred(commit)


class Renamed(BoxHandler):
    @property
    def name(self) -> str:  # type: ignore[override]
        return f"box{id(object())}{len(vars(self).setdefault('asked', []))}" + self._count()

    def _count(self) -> str:
        asked = vars(self)["asked"]
        asked.append(1)
        return str(len(asked))


class Forgetful(BoxHandler):
    async def load(self, entry: ItemEntry, like: Any, adapt: Any, reader: ItemReader) -> Any:
        self.refuse_target(like)
        await reader.read_file("box")
        return Box("")


class Careless(BoxHandler):
    async def load(self, entry: ItemEntry, like: Any, adapt: Any, reader: ItemReader) -> Any:
        self.refuse_target(like)
        assert isinstance(entry.data, str)
        return Box(entry.data)

    async def write(self, text: str, writer: ItemWriter) -> ItemEntry:
        await writer.write_file("box", text.encode())
        return ItemEntry(handler=self.name, nbytes=len(text), data=text)


class Greedy(BoxHandler):
    def refuse_item(self, item: Any) -> None:
        if not isinstance(item, Box):
            item.text = "box"


class Indifferent(BoxHandler):
    def refuse_target(self, like: Any) -> None:
        pass


class Crashing(BoxHandler):
    def refuse_target(self, like: Any) -> None:
        if like is not None:
            raise RuntimeError(like.text)


class Swallowing(BoxHandler):
    async def write(self, text: str, writer: ItemWriter) -> ItemEntry:
        try:
            await writer.in_thread(str)
            await writer.write_file("box", text.encode())
        except BaseException:
            raise InvalidArgumentError("could not write") from None
        return ItemEntry(handler=self.name, nbytes=len(text))


def case(handler: Any) -> HandlerCase:
    return HandlerCase(
        handler,
        lambda: Box("abc"),
        operator.eq,
        like=lambda: Box("x"),
        raw=operator.eq,
        change=lambda box: setattr(box, "text", "changed"),
    )


def test_a_good_handler_passes(tmp_path: Path) -> None:
    check_handler(case(BoxHandler()), tmp_path)


@pytest.mark.parametrize(
    ("handler", "check"),
    [
        (Late(), suite.it_may_be_changed_once_save_has_returned),
        (Renamed(), suite.it_has_a_stable_name),
        (Forgetful(), suite.it_brings_back_what_was_saved),
        (Careless(), suite.it_notices_damage),
        (Careless(), suite.it_refuses_entries_that_are_not_its_own),
        (Greedy(), suite.it_refuses_what_it_cannot_save),
        (Indifferent(), suite.it_refuses_a_target_of_another_kind),
        (Crashing(), suite.it_refuses_a_target_of_another_kind),
        (Swallowing(), suite.it_can_be_cancelled),
    ],
    ids=lambda each: getattr(each, "__name__", type(each).__name__),
)
def test_a_bad_handler_is_caught(handler: Any, check: Any, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check(case(handler), tmp_path)


def test_every_check_is_among_those_that_are_run() -> None:
    assert {check.__name__ for check in suite.CHECKS} == {
        name for name in vars(suite) if name.startswith(("it_", "its_"))
    }
