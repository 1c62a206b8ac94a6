"""What policies are made of and what they answer, checked; pure."""

from __future__ import annotations

import inspect
import json
import operator
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ckpt.errors import CheckpointError, InvalidArgumentError

__all__ = [
    "ask",
    "check_bool",
    "check_count",
    "check_seconds",
    "check_steps",
    "name_of",
    "plain_json",
    "shown",
    "truth_of",
    "whole_number",
    "why_no_policy",
]

T = TypeVar("T")

# The greatest step there can be; no count needs to be greater.
_MOST = 10**19 - 1


def check_count(policy: str, value: object, *, name: str = "", most: int = _MOST) -> int:
    """Return `value` as an int if it is a whole number, of Python or numpy, 1 or more.

    Raises:
        InvalidArgumentError: It is not, or is greater than `most`.
    """
    number = whole_number(value)
    if number is None or not 1 <= number <= most:
        is_bounded = most < _MOST or (number is not None and number > most)
        range_ = f"from 1 to {most}" if is_bounded else "1 or more"
        raise InvalidArgumentError(
            f"{policy}({_named(name)}{shown(value)}): expected a whole number, {range_}"
        )
    return number


def check_seconds(policy: str, value: object, *, name: str = "", zero: bool = False) -> None:
    """Raise unless `value` is a finite number of seconds above 0, or 0 if that may be.

    Raises:
        InvalidArgumentError: It is not.
    """
    seconds = value if isinstance(value, int | float) and not isinstance(value, bool) else -1
    # A whole number may be too large for a float.
    if not 0 <= seconds <= sys.float_info.max or (seconds == 0 and not zero):
        least = "0 or more" if zero else "more than 0"
        raise InvalidArgumentError(
            f"{policy}({_named(name)}{shown(value)}): expected a finite number of seconds, {least}"
        )


def check_bool(policy: str, value: object, *, name: str) -> None:
    """Raise unless `value` is True or False.

    Raises:
        InvalidArgumentError: It is not.
    """
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{policy}({name}={shown(value)}): expected True or False")


def check_steps(policy: str, steps: object) -> frozenset[int]:
    """Return `steps` as a set.

    Raises:
        InvalidArgumentError: It cannot be iterated over, or one of them is no step.
    """
    if not isinstance(steps, Iterable):
        raise InvalidArgumentError(
            f"{policy}({shown(steps)}): expected steps, such as {policy}([100, 1000])"
        )
    found = set()
    for step in steps:
        number = whole_number(step)
        if number is None or not 0 <= number <= _MOST:
            raise InvalidArgumentError(
                f"{policy}(...{shown(step)}...): expected steps: whole numbers, 0 or more"
            )
        found.add(number)
    return frozenset(found)


def whole_number(value: object) -> int | None:
    """Return a Python or numpy integer as an int, None for anything else; bool is none."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def why_no_policy(
    policy: object, method: str, *, several: str, other: tuple[str, str]
) -> str | None:
    """Return what could be meant by something that is no policy, None for what is one.

    Args:
        policy: One is an instance with the method, or a function; neither may be async.
        method: The method.
        several: How several are given as one.
        other: A method of what is given elsewhere, and a hint at where.
    """
    foreign, where = other
    if hasattr(policy, foreign) and not hasattr(policy, method):
        return where
    if isinstance(policy, type):
        return f"it is a class; give an instance: {policy.__name__}(...)"
    if isinstance(policy, list | tuple | set | frozenset):
        return f"give several as {several}(first, second)"
    function = getattr(policy, method, policy)
    if inspect.iscoroutinefunction(function):
        return "it is async, and a decision is made at once"
    return None if callable(function) else f"it is of type {type(policy).__name__}"


def ask(policy: object, question: Callable[..., T], *arguments: object) -> T:
    """Return what a policy answers.

    Raises:
        InvalidArgumentError: It raised something; what the library raised itself is passed on.
    """
    try:
        return question(*arguments)
    except CheckpointError:
        raise
    except Exception as error:
        raise InvalidArgumentError(
            f"{name_of(policy)} raised {type(error).__name__}: {error}"
        ) from error


def truth_of(answer: object) -> bool | None:
    """Return a bool, or a scalar of numpy or jax that is one, as a bool; None for others."""
    if isinstance(answer, bool):
        return answer
    kind = getattr(getattr(answer, "dtype", None), "kind", None)
    return bool(answer) if kind == "b" and getattr(answer, "shape", None) == () else None


def shown(value: object, most: int = 60) -> str:
    """Return how messages show what was given, in no more than `most` letters."""
    try:
        return f"{value!r:.{most}}"
    except ValueError:
        # Python refuses to write very long numbers.
        return f"<{type(value).__name__} too long to write>"


def name_of(policy: object) -> str:
    """Return how messages call a policy."""
    return getattr(policy, "__qualname__", None) or shown(policy, 120)


def _named(name: str) -> str:
    return f"{name}=" if name else ""


def plain_json(metadata: Any, step: int | None = None) -> Any:
    """Return a copy of `metadata` made of plain JSON values; tuples become lists.

    Raises:
        InvalidArgumentError: There are values that JSON has not, or a key that is no text.
    """
    try:
        copied = json.loads(json.dumps(metadata, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"metadata={shown(metadata, 120)}: expected JSON values only ({error})", step=step
        ) from error
    # Written as JSON they would be texts, and nobody would find them again.
    within = [metadata]
    while within:
        each = within.pop()
        if isinstance(each, dict):
            for key in each:
                if not isinstance(key, str):
                    raise InvalidArgumentError(
                        f"metadata={shown(metadata, 120)}: the key {shown(key)} is no text; "
                        "expected texts as keys, as JSON has no others",
                        step=step,
                    )
            within.extend(each.values())
        elif isinstance(each, list | tuple):
            within.extend(each)
    return copied
