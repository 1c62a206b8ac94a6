"""Handlers of objects that are no trees, by protocol."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

_LOG: logging.Logger = logging.getLogger("ckpt")
# File of an item that names the class of its handler.
_HANDLER_FILE = "ckpt_orbax_handler.txt"


@runtime_checkable
class StatefulCheckpointable(Protocol):
    """An object that saves and loads itself."""

    async def save(self, directory: Any) -> Awaitable[None]:
        """Take a snapshot, and return what writes it."""

    async def load(self, directory: Any) -> Awaitable[None]:
        """Return what reads the state."""


class CheckpointableHandler(Protocol):
    """Saves and loads objects of one kind."""

    async def save(self, directory: Any, checkpointable: Any) -> Awaitable[None]:
        """Take a snapshot, and return what writes it; `await directory.await_creation()` first."""

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Any]:
        """Return what reads the object."""

    async def metadata(self, directory: Any) -> Any:
        """Return the abstract form of the object."""

    def is_handleable(self, checkpointable: Any) -> bool:
        """Return True for objects that it saves."""

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        """Return True for abstract forms that it loads."""


class CheckpointableHandlerRegistry:
    """Handlers, of which the last that takes an object is used.

    Example:
        ```python
        registry = v1.handlers.local_registry()
        registry.add(MyV1Handler, checkpointable_name="data")
        ```
    """

    def __init__(self, other: CheckpointableHandlerRegistry | None = None) -> None:
        self._entries: list[tuple[str | None, Any]] = [] if other is None else list(other._entries)

    def add(self, handler_type: Any, checkpointable_name: str | None = None, **_: Any) -> Any:
        """Add a class of handlers, for all items or for one name.

        Example:
            ```python
            registry.add(MyV1Handler)
            ```
        """
        handler = handler_type() if isinstance(handler_type, type) else handler_type
        self._entries.append((checkpointable_name, handler))
        return self

    def of_object(self, name: str, item: Any) -> Any:
        """Return the handler that saves an object; None if `ckpt` does."""
        return self._last(name, lambda handler: handler.is_handleable(item))

    def of_stored(self, name: str, abstract: Any, kind: str) -> Any:
        """Return the handler that loads an item; None if `ckpt` does.

        Args:
            name: Name of the item.
            abstract: The abstract form that was asked for, or None.
            kind: The class of the handler that wrote it; empty if unknown.
        """
        if abstract is not None:
            found = self._last(name, lambda handler: handler.is_abstract_handleable(abstract))
            if found is not None:
                return found
        for given, handler in reversed(self._entries):
            if given == name or (kind and type_name(handler) == kind):
                return handler
        return None

    def _last(self, name: str, takes: Any) -> Any:
        named = [handler for given, handler in self._entries if given == name]
        others = [handler for given, handler in self._entries if given is None]
        for handler in (*reversed(named), *reversed(others)):
            if takes(handler):
                return handler
        return None


_GLOBAL = CheckpointableHandlerRegistry()


def global_registry() -> CheckpointableHandlerRegistry:
    """Return the registry that contexts begin with.

    Example:
        ```python
        registry = v1.handlers.global_registry()
        ```
    """
    return _GLOBAL


def local_registry(
    other: CheckpointableHandlerRegistry | None = None, **_: Any
) -> CheckpointableHandlerRegistry:
    """Return a registry of your own, which begins with the handlers of another one.

    Example:
        ```python
        registry = v1.handlers.local_registry()
        ```
    """
    return CheckpointableHandlerRegistry(_GLOBAL if other is None else other)


def register_handler(handler_cls: Any) -> Any:
    """Add a class of handlers to the global registry; also as a decorator.

    Example:
        ```python
        v1.handlers.register_handler(MyV1Handler)
        ```
    """
    _GLOBAL.add(handler_cls)
    return handler_cls


def type_name(handler: Any) -> str:
    """Return the name by which a handler is found again."""
    kind = type(handler)
    return f"{kind.__module__}.{kind.__qualname__}"


class HandledCheckpointable:
    """An object and its handler, as an object that saves and loads itself."""

    def __init__(self, handler: Any, item: Any) -> None:
        self._handler, self._item = handler, item
        self.found: Any = None

    async def save(self, directory: Any) -> Awaitable[None]:
        """Save it by its handler."""
        writing = await self._handler.save(directory, self._item)

        async def write() -> None:
            await writing
            path = await directory.await_creation()
            text = type_name(self._handler)
            await asyncio.to_thread((Path(path) / _HANDLER_FILE).write_text, text)

        return write()

    async def load(self, directory: Any) -> Awaitable[None]:
        """Load it by its handler."""
        reading = await self._handler.load(directory, self._item)

        async def read() -> None:
            self.found = await reading

        return read()


def handler_of(path: str, item: str) -> str:
    """Return the name of the handler that wrote an item; empty if that is unknown."""
    file = Path(path, item, _HANDLER_FILE)
    try:
        return file.read_text()
    except OSError:
        return ""
