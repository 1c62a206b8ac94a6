"""Help for a forgotten `await`, and for `with` where `async with` is needed."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from ckpt.errors import InvalidArgumentError, NotAwaitedError

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Coroutine[Any, Any, Any]])


class UnawaitedCall(Coroutine[Any, Any, T]):
    """The coroutine of a call; says what to do if it is used as its result, or dropped."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], name: str, instead: str) -> None:
        """Stand for `coroutine`, which a call of `name` has made; `instead` needs no await."""
        self._coroutine = coroutine
        self._name = name
        self._instead = instead
        self._is_awaited = False

    def __await__(self) -> Generator[Any, Any, T]:
        self._is_awaited = True
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        """Go on with the coroutine, as an event loop does."""
        self._is_awaited = True
        return self._coroutine.send(value)

    def throw(self, kind: Any, value: Any = None, traceback: TracebackType | None = None) -> Any:
        """Raise an error inside the coroutine, as an event loop does."""
        self._is_awaited = True
        # The forms with two and three arguments are deprecated.
        error = kind if value is None else value
        return self._coroutine.throw(error)

    def close(self) -> None:
        """Give the coroutine up."""
        self._is_awaited = True
        self._coroutine.close()

    def __getattr__(self, name: str) -> Any:
        # Event loops and debuggers look at attributes of coroutines and generators.
        if self._is_awaited or name.startswith(("_", "cr_", "gi_", "ag_")):
            return getattr(self._coroutine, name)
        raise self._not_awaited(f".{name}")

    def __getitem__(self, key: object) -> NoReturn:
        raise self._not_awaited("[...]")

    def __iter__(self) -> NoReturn:
        raise self._not_awaited("")

    def __repr__(self) -> str:
        return f"<call of {self._name} that is to be awaited>"

    def __del__(self) -> None:
        if not self._is_awaited:
            self._coroutine.close()
            warnings.warn(
                f"{self._name}(...) was never awaited, so it did nothing: write "
                f"'await {self._name}(...)', or use {self._instead}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _not_awaited(self, used: str) -> NotAwaitedError:
        self.close()
        return NotAwaitedError(
            f"{self._name}(...){used}: the call has to be awaited first. Write "
            f"(await {self._name}(...)){used}, or use {self._instead}"
        )


def awaited(name: str, instead: str) -> Callable[[Function], Function]:
    """Let a coroutine function say what to do if `await` is forgotten.

    Args:
        name: How users call it.
        instead: What to use without asyncio.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return UnawaitedCall(function(*args, **kwargs), name, instead)

        # From Python 3.12 on, tools can see that it returns a coroutine.
        mark: Any = getattr(inspect, "markcoroutinefunction", lambda function: function)
        found: Function = mark(call)
        return found

    return decorate


def awaited_methods(name: str, instead: str) -> Callable[[type[T]], type[T]]:
    """Let all public coroutine functions of a class do the same; `name` is an object of it."""

    def decorate(kind: type[T]) -> type[T]:
        for method, function in list(vars(kind).items()):
            if not method.startswith("_") and inspect.iscoroutinefunction(function):
                setattr(kind, method, awaited(f"{name}.{method}", instead)(function))
        return kind

    return decorate


def refused(advice: str) -> Callable[..., Any]:
    """Return a method for syntax that a class does not have; it says what to use instead."""

    def refuse(self: object, *_: object) -> NoReturn:
        raise InvalidArgumentError(advice)

    return refuse
