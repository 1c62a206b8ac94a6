"""Handlers, by the names that programs know. What they do is done by the arguments of an item."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_orbax import args as args_lib

__all__ = [
    "ArrayCheckpointHandler",
    "AsyncCheckpointHandler",
    "BasePyTreeCheckpointHandler",
    "CheckpointHandler",
    "CheckpointHandlerRegistry",
    "CompositeCheckpointHandler",
    "DefaultCheckpointHandlerRegistry",
    "JaxRandomKeyCheckpointHandler",
    "JsonCheckpointHandler",
    "NumpyRandomKeyCheckpointHandler",
    "ProtoCheckpointHandler",
    "PyTreeCheckpointHandler",
    "StandardCheckpointHandler",
]


class CheckpointHandler:
    """The base class of handlers of your own: `save(directory, args)`, `restore(directory, args)`.

    Register its arguments with `args.register_with_handler`. Its files become an item of a step.
    """

    def save(self, directory: Any, args: Any) -> None:
        """Write an item into a directory that exists."""
        raise NotImplementedError

    def restore(self, directory: Any, args: Any) -> Any:
        """Return the item in a directory."""
        raise NotImplementedError

    def metadata(self, directory: Any) -> Any:
        """Return what is known of the item without its values."""
        raise NotImplementedError

    def finalize(self, directory: Any) -> None:
        """Called once `save` has written everything."""

    def close(self) -> None:
        """Called by nobody; a handler may have it."""

    @classmethod
    def typestr(cls) -> str:
        """Return the name of the class, as metadata of a step have it."""
        return f"{cls.__module__}.{cls.__qualname__}"


class AsyncCheckpointHandler(CheckpointHandler):
    """As `CheckpointHandler`. Its `save` is called, in another thread."""


class _BuiltIn(CheckpointHandler):
    """A handler whose work is done by `ckpt`. Options of its constructor have no effect."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Accept the options of Orbax."""

    @classmethod
    def typestr(cls) -> str:
        """Return the name that Orbax has for the class."""
        words = cls.__name__.removesuffix("CheckpointHandler").lower()
        return f"orbax.checkpoint._src.handlers.{words}_checkpoint_handler.{cls.__name__}"


class PyTreeCheckpointHandler(_BuiltIn):
    """Trees, with `PyTreeSave` and `PyTreeRestore`."""


class BasePyTreeCheckpointHandler(PyTreeCheckpointHandler):
    """Trees, with `PyTreeSave` and `PyTreeRestore`."""


class StandardCheckpointHandler(_BuiltIn):
    """Trees, with `StandardSave` and `StandardRestore`."""


class JsonCheckpointHandler(_BuiltIn):
    """JSON values, with `JsonSave` and `JsonRestore`."""


class ArrayCheckpointHandler(_BuiltIn):
    """Single arrays, with `ArraySave` and `ArrayRestore`."""


class ProtoCheckpointHandler(_BuiltIn):
    """Messages, with `ProtoSave` and `ProtoRestore`."""


class JaxRandomKeyCheckpointHandler(_BuiltIn):
    """Keys, with `JaxRandomKeySave` and `JaxRandomKeyRestore`."""


class NumpyRandomKeyCheckpointHandler(_BuiltIn):
    """States of numpy, with `NumpyRandomKeySave` and `NumpyRandomKeyRestore`."""


class CompositeCheckpointHandler(_BuiltIn):
    """Several items, with `Composite`."""

    def __init__(self, *item_names: str, **items_and_handlers: Any) -> None:
        """Take the handlers of items by name."""
        known = {k: v for k, v in items_and_handlers.items() if isinstance(v, CheckpointHandler)}
        self.handlers: dict[str, Any] = dict.fromkeys(item_names) | known


_PAIRS = {
    PyTreeCheckpointHandler: (args_lib.PyTreeSave, args_lib.PyTreeRestore),
    StandardCheckpointHandler: (args_lib.StandardSave, args_lib.StandardRestore),
    JsonCheckpointHandler: (args_lib.JsonSave, args_lib.JsonRestore),
    ArrayCheckpointHandler: (args_lib.ArraySave, args_lib.ArrayRestore),
    ProtoCheckpointHandler: (args_lib.ProtoSave, args_lib.ProtoRestore),
    JaxRandomKeyCheckpointHandler: (args_lib.JaxRandomKeySave, args_lib.JaxRandomKeyRestore),
    NumpyRandomKeyCheckpointHandler: (args_lib.NumpyRandomKeySave, args_lib.NumpyRandomKeyRestore),
    CompositeCheckpointHandler: (args_lib.Composite, args_lib.Composite),
}
for _handler, (_save, _restore) in _PAIRS.items():
    args_lib.register_with_handler(_handler, for_save=True)(_save)
    args_lib.register_with_handler(_handler, for_restore=True)(_restore)


class CheckpointHandlerRegistry:
    """Handlers by the name of an item and the arguments that they take.

    Example:
        ```python
        registry = ocp.handlers.CheckpointHandlerRegistry()
        registry.add("data", MySave, MyHandler())
        mngr = ocp.CheckpointManager(directory, handler_registry=registry)
        ```
    """

    def __init__(self, other_registry: CheckpointHandlerRegistry | None = None) -> None:
        known = {} if other_registry is None else other_registry.get_all_entries()
        self._entries: dict[tuple[str | None, type], Any] = dict(known)

    def add(self, item: str | None, args_type: type, handler: Any = None) -> None:
        """Add a handler, or its class; None is the one that takes these arguments.

        Example:
            ```python
            registry.add("state", ocp.args.StandardSave)
            ```
        """
        if handler is None:
            handler = args_lib.get_registered_handler_cls(args_type)
        if (item, args_type) in self._entries:
            raise ValueError(f"the item {item!r} has a handler for {args_type.__name__} already")
        self._entries[item, args_type] = handler() if isinstance(handler, type) else handler

    def has(self, item: str | None, args_type: type) -> bool:
        """Return True if there is such a handler.

        Example:
            ```python
            assert registry.has("state", ocp.args.StandardSave)
            ```
        """
        return (item, args_type) in self._entries

    def get(self, item: str | None, args_type: type) -> Any:
        """Return the handler.

        Raises:
            KeyError: There is none.

        Example:
            ```python
            handler = registry.get("state", ocp.args.StandardSave)
            ```
        """
        return self._entries[(item, args_type) if self.has(item, args_type) else (None, args_type)]

    def get_all_entries(self) -> Mapping[tuple[str | None, type], Any]:
        """Return all handlers.

        Example:
            ```python
            print(registry.get_all_entries())
            ```
        """
        return self._entries


class DefaultCheckpointHandlerRegistry(CheckpointHandlerRegistry):
    """A registry that knows the handlers of all arguments of this module."""


class ItemHandlers:
    """The handlers of a manager or checkpointer that are the user's own, by item."""

    def __init__(self) -> None:
        self._by_name: dict[str | None, Any] = {}
        self._by_args: Mapping[tuple[str | None, type], Any] = {}
        self.is_single: bool | None = None

    @classmethod
    def of(
        cls, given: Any, names: Any = None, registry: CheckpointHandlerRegistry | None = None
    ) -> ItemHandlers:
        """Take what the constructors of Orbax take.

        Args:
            given: A handler, handlers by item name, or None.
            names: Names of items, or None.
            registry: A registry, or None.

        Raises:
            ValueError: They contradict each other.
        """
        found = cls()
        if registry is not None and (given is not None or names is not None):
            raise ValueError("handler_registry goes without item_handlers and item_names")
        if isinstance(given, CompositeCheckpointHandler):
            given = given.handlers
        if given is not None and not isinstance(given, Mapping):
            if names:
                raise ValueError("item_names goes with handlers by name, and not with one handler")
            found._by_name = {None: given}
            found.is_single = True
        elif given is not None or names is not None:
            found._by_name = dict.fromkeys(names or ()) | dict(given or {})
            found.is_single = False
        if registry is not None:
            found._by_args = registry.get_all_entries()
        return found

    def own(self, item: str | None, args: Any) -> Any:
        """Return the user's own handler of an item; None if `ckpt` saves and restores it."""
        found = self._by_name.get(item)
        if found is None:
            by_item = self._by_args.get((item, type(args)))
            found = self._by_args.get((None, type(args))) if by_item is None else by_item
        return None if found is None or isinstance(found, _BuiltIn) else found

    def check(self, item: str | None, args: Any) -> None:
        """Raise ValueError for an item or for arguments that are not those that were declared."""
        handler = self._by_name.get(item)
        is_known = item in self._by_name or not self._by_name
        if handler is not None and args_lib.has_registered_args(handler):
            is_known = isinstance(args, args_lib.get_registered_args_cls(handler))
        if not is_known:
            raise ValueError(
                f"the item {item!r} with {type(args).__name__} does not match with any registered "
                f"handler: {self._by_name}"
            )

    def args_classes(self, item: str | None) -> tuple[type, type]:
        """Return the arguments for saves and restores of an item, for calls without arguments."""
        found = self._by_name.get(item)
        if found is None:
            return args_lib.StandardSave, args_lib.StandardRestore
        if not args_lib.has_registered_args(found):
            return args_lib.LegacyArgs, args_lib.LegacyArgs
        return args_lib.get_registered_args_cls(found)
