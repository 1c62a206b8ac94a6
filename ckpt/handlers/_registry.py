"""The registry of handlers: those passed, those installed, and the built-in ones."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from msgspec import Struct

from ckpt._arguments import invalid, refuse_orbax_argument, shown
from ckpt.errors import InvalidArgumentError, UnsupportedFormatError
from ckpt.handlers._base import Handler, errors_of
from ckpt.handlers._pytree import PyTreeHandler

logger = logging.getLogger("ckpt")

# Entry point group in which packages register handlers.
ENTRY_POINTS = "ckpt.handlers"
HandlersLike: TypeAlias = Sequence[Handler] | Mapping[str, Handler]

_NAME = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.:-]{0,99}\Z")
_METHODS = ("accepts", "stage", "load")


class Handlers(Struct, frozen=True):
    """The handlers of one manager or call.

    Attributes:
        by_item: Handlers for items of these names; they are not asked whether they accept.
        given: Handlers that are asked one after the other for all other items, before the built-in
            ones.
        trees: Handlers of trees, which take everything and are asked last.
    """

    by_item: Mapping[str, Handler]
    given: tuple[Handler, ...]
    trees: tuple[Handler, ...]

    def for_item(self, item: str, value: Any) -> Handler:
        """Return the handler that saves `value` as the item called `item`.

        Raises:
            InvalidArgumentError: No handler accepts it.
            UnsupportedLeafError: The value is an argument of Orbax.
            HandlerError: A handler raised when it was asked.
        """
        refuse_orbax_argument(value, item)
        chosen = self.by_item.get(item)
        if chosen is not None:
            return chosen
        # The other built-in handlers take only what is a leaf to jax, and need not be imported.
        others = built_in() if jax.tree_util.all_leaves([value]) else ()
        asked = (*self.given, *others, *self.trees)
        for handler in asked:
            if isinstance(handler, PyTreeHandler) and handler.packs(value):
                return handler
        for handler in asked:
            with errors_of(handler, item, f"say whether it takes a {type(value).__name__}"):
                if handler.accepts(value):
                    return handler
        known = ", ".join(handler.name for handler in asked)
        raise InvalidArgumentError(
            f"no handler takes an object of type {type(value).__name__} (handlers: {known})",
            item=item,
        )

    def named(self, name: str, item: str) -> Handler:
        """Return the handler that loads the item called `item`, written by a handler named `name`.

        Raises:
            UnsupportedFormatError: There is no handler of that name.
        """
        for handler in self._of(item):
            if handler.name == name:
                return handler
        known = ", ".join(sorted({handler.name for handler in self._of(item)}))
        raise UnsupportedFormatError(
            f"written by the handler {name!r:.80}, which is not here (handlers: {known}); pass it "
            "as handlers=[...], or restore the other items only",
            item=item,
        )

    def _of(self, item: str) -> Iterator[Handler]:
        if item in self.by_item:
            yield self.by_item[item]
        yield from self.by_item.values()
        yield from (*self.given, *self.trees)
        yield from built_in()


def find_handlers(given: HandlersLike) -> Handlers:
    """Return the handlers of a call: the passed ones first, the handler of trees last.

    Args:
        given: Handlers to be asked in order, or a mapping from names of items to handlers.

    Raises:
        InvalidArgumentError: Something other than a handler is in `given`.
    """
    mapped: object = given
    by_item = dict(given) if isinstance(given, Mapping) else {}
    if not isinstance(mapped, Mapping) and (
        isinstance(mapped, str | type) or not isinstance(mapped, Iterable)
    ):
        what = "a list of handlers, or a mapping of item names to handlers"
        raise invalid("handlers", given, what)
    first = () if isinstance(given, Mapping) else tuple(given)
    for handler in (*by_item.values(), *first):
        problem = _problem(handler)
        if problem is not None:
            raise InvalidArgumentError(f"handlers={shown(given)}: {problem}")
    # The tree handler takes everything, so it comes last. One that is passed, to know more
    # classes, is asked in the place of the built-in one.
    trees = [handler for handler in first if type(handler) is PyTreeHandler]
    others = [handler for handler in first if type(handler) is not PyTreeHandler]
    return Handlers(by_item, (*others, *installed_handlers()), (*trees, PyTreeHandler()))


@functools.cache
def built_in() -> tuple[Handler, ...]:
    """Return the built-in handlers but that of trees, in the order in which they are asked."""
    from ckpt.handlers._json import JsonHandler
    from ckpt.handlers._protobuf import ProtobufHandler
    from ckpt.handlers._random_state import RandomStateHandler
    from ckpt.handlers._stateful import StatefulHandler
    from ckpt.handlers._text import BytesHandler

    return (
        BytesHandler(),
        RandomStateHandler(),
        ProtobufHandler(),
        # Before models and dataclasses: an object with methods for its state is saved by these.
        StatefulHandler(),
        JsonHandler(),
    )


@functools.cache
def installed_handlers() -> tuple[Handler, ...]:
    """Return the handlers that installed packages register, in the order of their names.

    An entry point of the group `ckpt.handlers` names a handler, or a function that makes one
    without arguments. A handler that cannot be loaded is logged as a warning and left out.
    """
    points = importlib.metadata.entry_points(group=ENTRY_POINTS)
    found: list[Handler] = []
    taken = {PyTreeHandler.name, *(handler.name for handler in built_in())} if points else set()
    for point in sorted(points, key=lambda each: (each.name, each.value)):
        try:
            made: Any = point.load()
            if isinstance(made, type) or not hasattr(made, "stage"):
                made = made()
            problem = _problem(made)
            if problem is None and made.name in taken:
                problem = f"there is a handler named {made.name!r} already"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem is None:
            taken.add(made.name)
            found.append(made)
        else:
            logger.warning(
                "the handler %r (%s) that is installed cannot be used: %s",
                point.name,
                point.value,
                problem,
            )
    return tuple(found)


def _problem(handler: Any) -> str | None:
    """Return why an object cannot be a handler, or None."""
    if isinstance(handler, type):
        return f"{handler.__name__} is a class; pass an object of it"
    missing = [name for name in _METHODS if not callable(getattr(handler, name, None))]
    if missing:
        return f"{handler!r:.80} is not a handler: it has no method {', '.join(missing)}"
    name = getattr(handler, "name", None)
    if not isinstance(name, str) or not _NAME.match(name):
        return f"the name {name!r:.80} of a handler: expected 1 to 100 letters, digits or '_.:-'"
    return None
