"""Policies that users wrote: whether they can be asked, and what their answers mean."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

from ckpt._arguments import shown
from ckpt.errors import CheckpointError, InvalidArgumentError

T = TypeVar("T")


def why_not_a_policy(
    policy: object, method: str, *, several: str, other: tuple[str, str]
) -> str | None:
    """Return why something cannot be asked as a policy, or None if it can.

    Args:
        policy: An instance with the method, or a function; neither may be async.
        method: The method.
        several: The class that combines several policies.
        other: A method of the other kind of policy, and where to pass that kind.
    """
    foreign, where = other
    if hasattr(policy, foreign) and not hasattr(policy, method):
        return where
    if isinstance(policy, type):
        return f"it is a class; pass an instance: {policy.__name__}(...)"
    if isinstance(policy, list | tuple | set | frozenset):
        return f"pass several as {several}(first, second)"
    function = getattr(policy, method, policy)
    if inspect.iscoroutinefunction(function):
        return "it is async, but policies answer at once"
    return None if callable(function) else f"it is of type {type(policy).__name__}"


def ask(policy: object, question: Callable[..., T], *arguments: object) -> T:
    """Return what a policy answers.

    Raises:
        InvalidArgumentError: It raised an error. Errors of this library are passed on unchanged.
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
    """Return a bool, or a boolean scalar of numpy or jax, as a bool; None for anything else."""
    if isinstance(answer, bool):
        return answer
    kind = getattr(getattr(answer, "dtype", None), "kind", None)
    return bool(answer) if kind == "b" and getattr(answer, "shape", None) == () else None


def name_of(policy: object) -> str:
    """Return how messages call a policy."""
    return getattr(policy, "__qualname__", None) or shown(policy)
