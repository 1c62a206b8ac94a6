"""The `Handler` protocol: how one kind of item becomes leaves and files, and comes back.

A handler says *what* an item is; the engine moves the bytes, so that budget, checksums, errors and
cancellation are the same for every handler.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from ckpt.errors import InvalidArgumentError, UnsupportedFormatError
from ckpt.layout.match import ArrayTarget
from ckpt.layout.records import LeafRecords
from ckpt.layout.structure import Structure
from ckpt.manifest import ItemEntry

__all__ = ["Deferred", "Handler", "ItemReader", "ItemWriter", "handler_for", "handler_named"]

T = TypeVar("T")


class Deferred(Generic[T]):
    """An awaitable that starts when it is awaited and may be dropped without a warning."""

    def __init__(self, function: Callable[[], Awaitable[T]]) -> None:
        """Await `function()` when awaited."""
        self._function = function

    def __await__(self) -> Generator[Any, Any, T]:
        return self._function().__await__()


class ItemWriter(Protocol):
    """What the engine offers a handler while it saves one item."""

    async def stage(self, structure: Structure) -> Awaitable[LeafRecords]:
        """Stage leaves; return once they are safe from whatever the caller does.

        Awaiting the result gives their manifest entries once they are durable.

        Raises:
            UnsupportedLeafError: A leaf cannot be stored; names its path.
        """

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Run a slow pure function off the engine's loop."""


class ItemReader(Protocol):
    """What the engine offers a handler while it loads one item."""

    async def read(self, entry: ItemEntry, targets: Sequence[ArrayTarget | None]) -> list[Any]:
        """Read the arrays of the leaves that have a target; others give None."""

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Run a slow pure function off the engine's loop."""


class Handler(Protocol):
    """How one kind of item is saved and loaded.

    Attributes:
        name: Written to disk; stable for ever, and never a Python path.
    """

    @property
    def name(self) -> str:
        """The stable name."""

    def accepts(self, item: Any) -> bool:
        """Tell whether this handler saves objects such as `item`."""

    async def stage(self, item: Any, writer: ItemWriter) -> Awaitable[ItemEntry]:
        """Take a snapshot of `item`; on return the caller may change or donate it.

        Returns:
            The commit future: awaiting it gives the item's manifest entry once its data is
            durable.
        """

    async def load(self, entry: ItemEntry, like: Any, reader: ItemReader) -> Any:
        """Return the item of `entry`.

        Args:
            entry: The item's manifest entry.
            like: The target, or None for the item as it was saved.
            reader: The engine.
        """


def handler_for(item: Any, handlers: Sequence[Handler], name: str) -> Handler:
    """Return the first handler that takes `item`, the item called `name`.

    Raises:
        InvalidArgumentError: None does.
    """
    for handler in handlers:
        if handler.accepts(item):
            return handler
    known = ", ".join(handler.name for handler in handlers)
    raise InvalidArgumentError(
        f"no handler takes an object of type {type(item).__name__} (handlers: {known})", item=name
    )


def handler_named(name: str, handlers: Sequence[Handler], item: str) -> Handler:
    """Return the handler that wrote an item.

    Raises:
        UnsupportedFormatError: There is none of that name.
    """
    for handler in handlers:
        if handler.name == name:
            return handler
    known = ", ".join(handler.name for handler in handlers)
    raise UnsupportedFormatError(
        f"written by the handler {name!r:.80}, which is not here (handlers: {known}); pass it as "
        "handlers=[...]",
        item=item,
    )
