"""Checks of arguments: each returns the value, or raises an error that says what was expected."""

from __future__ import annotations

import json
import operator
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from ckpt._redaction import redact
from ckpt.errors import InvalidArgumentError, UnsupportedLeafError

T = TypeVar("T")

# Nineteen digits hold every step a 64-bit counter can; no count needs to be greater.
_MOST = 10**19 - 1
# Characters of a value that are searched for secrets; messages show far fewer.
_MOST_READ = 100_000
# The class of all arguments of Orbax, which need not be installed.
_ORBAX_ARGUMENT = "orbax.checkpoint.checkpoint_args.CheckpointArgs"


def invalid(
    name: str, value: object, expected: str, *, of: str = "", step: int | None = None
) -> InvalidArgumentError:
    """Return the error for a wrong argument.

    Args:
        name: The parameter.
        value: The value that was passed.
        expected: Description of a right value, and what to do if that is not obvious.
        of: The class or function the parameter belongs to, where the name alone is not clear.
        step: The step that the call was about.
    """
    given = f"{name}={shown(value)}"
    return InvalidArgumentError(
        f"{of}({given}): expected {expected}" if of else f"{given}: expected {expected}", step=step
    )


def shown(value: object, most: int = 120) -> str:
    """Return a value as messages show it: without secrets, in at most `most` characters."""
    try:
        text = repr(value)
    except ValueError:
        # Python refuses to write very long numbers.
        return f"<{type(value).__name__} too long to write>"
    # Redacted before it is cut: a part of a secret would not be recognised.
    return redact(text[:_MOST_READ])[:most]


def refuse_orbax_argument(value: object, item: str | None = None, leaf: str | None = None) -> None:
    """Refuse the arguments in which Orbax wraps a state for its own `save` and `restore`.

    Raises:
        UnsupportedLeafError: `value` is such an argument.
    """
    kind = type(value)
    if any(f"{each.__module__}.{each.__name__}" == _ORBAX_ARGUMENT for each in kind.__mro__):
        raise UnsupportedLeafError(
            f"args.{kind.__name__.removesuffix('Args')}(...) is an argument of Orbax: pass the "
            "object itself, or several objects as items={name: object, ...}",
            item=item,
            leaf=leaf,
        )


def instance_of(name: str, value: T | None, wanted: type[T], *, of: str = "") -> T | None:
    """Return `value`, which must be a `wanted` or None."""
    given: object = value
    if given is not None and not isinstance(given, wanted):
        what = f"a {wanted.__name__}, not {type(given).__name__}"
        raise invalid(name, given, what, of=of)
    return value


def true_or_false(name: str, value: object, *, of: str = "") -> None:
    if not isinstance(value, bool):
        raise invalid(name, value, "True or False", of=of)


def one_of(name: str, value: object, choices: Sequence[str], *, of: str = "") -> None:
    if not isinstance(value, str) or value not in choices:
        raise invalid(name, value, f"one of {', '.join(map(repr, choices))}", of=of)


def as_int(value: object) -> int | None:
    """Return a Python or numpy integer as an int; None for a bool or anything else."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def whole_number(
    name: str, value: object, *, of: str = "", least: int = 1, most: int = _MOST, hint: str = ""
) -> int:
    """Return `value`, an integer of Python or numpy from `least` to `most`, as an int."""
    number = as_int(value)
    if number is None or not least <= number <= most:
        is_bounded = most < _MOST or (number is not None and number > most)
        limits = f" from {least} to {most}" if is_bounded else f", {least} or more"
        raise invalid(name, value, f"a whole number{limits}{hint}", of=of)
    return number


def number_of_seconds(
    name: str,
    value: object,
    *,
    of: str = "",
    zero: bool = False,
    most: float = sys.float_info.max,
) -> float:
    """Return `value`, a number of seconds above 0, or 0 with `zero`, and up to `most`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, int | float) and is_number and 0 <= value <= most and (value or zero):
        return float(value)
    limit = "" if most == sys.float_info.max else f" and up to {most:.0f}"
    least = "from 0" if zero else "above 0"
    raise invalid(name, value, f"a finite number of seconds {least}{limit}", of=of)


def check_step(step: object, name: str = "step", *, of: str = "", hint: str = "") -> int:
    """Return `step` as an int.

    Raises:
        InvalidArgumentError: `step` is not a whole number from 0 to 10**19 - 1.
    """
    number = as_int(step)
    if number is None or not 0 <= number <= _MOST:
        what = "a whole number, 0 or more, such as the training step"
        if number is not None and number > _MOST:
            what = f"a step of at most {_MOST}"
        raise invalid(name, step, hint or what, of=of)
    return number


def set_of_steps(name: str, value: object, *, of: str) -> frozenset[int]:
    if not isinstance(value, Iterable):
        raise invalid(name, value, f"steps, such as {of}([100, 1000])", of=of)
    return frozenset(check_step(step, f"...{name}", of=of) for step in value)


def is_config(value: object) -> bool:
    """Return True if `value` has keys but is no dict, as in ml_collections and OmegaConf."""
    return not isinstance(value, dict) and hasattr(type(value), "keys")


def plain_config(value: Any) -> Any:
    """Return `value` with its configurations as dicts, and their lists as lists."""
    if isinstance(value, dict) or is_config(value):
        return {key: plain_config(value[key]) for key in value}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain_config(each) for each in value]
    return value


def plain_json(name: str, value: Any, *, step: int | None = None) -> Any:
    """Return a copy of `value` as plain JSON values; tuples and configurations are converted.

    Raises:
        InvalidArgumentError: JSON cannot hold a value in it, or a key is not a string.
    """
    try:
        value = plain_config(value)
        copied = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise invalid(name, value, f"JSON values only ({error})", step=step) from error
    # json.dumps turns other keys into strings, under which they would not be found again.
    within = [value]
    for each in within:
        if isinstance(each, dict):
            for key in each:
                if not isinstance(key, str):
                    what = f"strings as keys, as in JSON, not {shown(key)}"
                    raise invalid(name, value, what, step=step)
        if isinstance(each, dict | list):
            within.extend(each.values() if isinstance(each, dict) else each)
    return copied
