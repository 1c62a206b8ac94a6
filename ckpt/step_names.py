"""Names of the directories that steps are stored in."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, cast

from ckpt._arguments import invalid, one_of, shown, whole_number
from ckpt.errors import InvalidArgumentError

__all__ = ["Composite", "Standard", "StepNames", "checked"]


def __dir__() -> list[str]:
    return __all__


_PREFIX = re.compile(r"^[A-Za-z][A-Za-z0-9_.-]{0,99}\Z")
# Nineteen digits hold every step a 64-bit counter can.
_MOST_DIGITS = 19
_NUMBER = re.compile(r"^[0-9]{1,19}\Z")
# Other names could lead out of the root, be hidden, or have another meaning.
_NAME = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.=+,@-]{0,149}\Z")
_TAKEN = frozenset({"metadata"})
_UNFINISHED = ".orbax-checkpoint-tmp"


class StepNames(Protocol):
    """Maps steps to directory names and back. Must be pure."""

    def name(self, step: int) -> str:
        """Return the name of the directory that `step` is written to."""

    def step(self, name: str) -> int | None:
        """Return the step that is stored in a directory of this name, or None."""


@dataclass(frozen=True, slots=True)
class Standard:
    """Decimal numbers, optionally padded with zeros, and with a prefix and a separator in front.

    `Standard("ckpt", 8)` names step 100 `ckpt_00000100`, as Orbax does with `step_prefix="ckpt"`
    and `step_format_fixed_length=8`.

    Attributes:
        prefix: The text before the `_`; empty for the number alone.
        digits: The least number of digits; 0 does not pad.
        separator: Character between the prefix and the number: `_` or `-`.

    Raises:
        InvalidArgumentError: `prefix` cannot begin the name of a directory, `digits` is not a whole
            number from 0 to 19, or `separator` is neither `_` nor `-`.

    Example:
        ```python
        names = ckpt.step_names.Standard("ckpt", 8)
        mgr = ckpt.CheckpointManager(root, step_names=names)
        ```
    """

    prefix: str = ""
    digits: int = 0
    separator: str = "_"

    def __post_init__(self) -> None:
        prefix: object = self.prefix
        fits = isinstance(prefix, str) and (not prefix or _PREFIX.match(prefix))
        if not fits or _UNFINISHED in self.prefix:
            what = "up to 100 letters, digits, '_', '-' or '.', beginning with a letter"
            raise invalid("prefix", prefix, what, of="Standard")
        digits = whole_number("digits", self.digits, of="Standard", least=0, most=_MOST_DIGITS)
        object.__setattr__(self, "digits", digits)
        one_of("separator", self.separator, ("_", "-"), of="Standard")

    def name(self, step: int) -> str:
        """Return the name of the directory that `step` is written to."""
        front = f"{self.prefix}{self.separator}" if self.prefix else ""
        return f"{front}{step:0{self.digits}d}"

    def step(self, name: str) -> int | None:
        """Return the step that has this name, or None."""
        number = name.removeprefix(f"{self.prefix}{self.separator}") if self.prefix else name
        if not _NUMBER.match(number):
            return None
        step = int(number)
        # A step has one name: '007' is not step 7 if that is written as '7'.
        return step if self.name(step) == name else None


class Composite:
    """Writes names of one kind and reads several kinds, for a root whose naming has changed.

    If a step exists under several names, the one with the name written now counts.

    Args:
        write: The names of new steps; they are read, too.
        read: Further kinds of names to read.

    Example:
        ```python
        names = ckpt.step_names.Composite(
            ckpt.step_names.Standard("ckpt", 8), ckpt.step_names.Standard()
        )
        mgr = ckpt.CheckpointManager(root, step_names=names)
        ```
    """

    def __init__(self, write: StepNames, *read: StepNames) -> None:
        self._write, *self._read = (checked(each) for each in (write, *read))

    def name(self, step: int) -> str:
        """Return the name of the directory that `step` is written to."""
        return self._write.name(step)

    def step(self, name: str) -> int | None:
        """Return the step that has this name in any of the kinds, or None."""
        found = (each.step(name) for each in (self._write, *self._read))
        return next((step for step in found if step is not None), None)

    def __repr__(self) -> str:
        return f"Composite({', '.join(map(repr, (self._write, *self._read)))})"


def checked(names: object) -> StepNames:
    """Return `names`, with a check of every answer.

    Raises:
        InvalidArgumentError: `names` lacks the methods `name` and `step`. The methods of the result
            raise it if `names` raises an error, returns a name that a directory cannot have or that
            it reads as another step, or returns something that is not a step.

    Example:
        ```python
        names = ckpt.step_names.checked(ckpt.step_names.Standard("ckpt", 8))
        assert names.name(100) == "ckpt_00000100"
        ```
    """
    if type(names) is Standard:
        return names
    if isinstance(names, type) or not (
        callable(getattr(names, "name", None)) and callable(getattr(names, "step", None))
    ):
        what = (
            "an object with the methods name(step) and step(name), such as "
            "ckpt.step_names.Standard('ckpt', 8)"
        )
        raise invalid("step_names", names, what)
    return _Checked(cast(StepNames, names))


class _Checked:
    """Step names that a user wrote, with a check of every answer."""

    def __init__(self, names: StepNames) -> None:
        self._names = names

    def name(self, step: int) -> str:
        with self._translated(step):
            name: object = self._names.name(step)
        usable = isinstance(name, str) and _NAME.match(name) and _UNFINISHED not in name
        if not isinstance(name, str) or not usable or name in _TAKEN:
            raise InvalidArgumentError(
                f"step_names: {shown(self._names)} names it {shown(name, 160)}; expected 1 to 150 "
                "letters, digits or characters of '_.=+,@-', beginning with a letter, a digit or "
                "'_', and not 'metadata'",
                step=step,
            )
        if (read := self.step(name)) != step:
            raise InvalidArgumentError(
                f"step_names: {shown(self._names)} names it {name!r} and reads that as {read}",
                step=step,
            )
        return name

    def step(self, name: str) -> int | None:
        # Other names cannot belong to a step.
        if not _NAME.match(name) or name in _TAKEN:
            return None
        with self._translated(None):
            step: object = self._names.step(name)
        if step is None or (type(step) is int and 0 <= step < 10**_MOST_DIGITS):
            return step
        raise InvalidArgumentError(
            f"step_names: {shown(self._names)} reads {name!r} as {shown(step)}; expected a whole "
            "number, 0 or more, or None"
        )

    @contextlib.contextmanager
    def _translated(self, step: int | None) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise InvalidArgumentError(
                f"step_names: {shown(self._names)} raised {type(error).__name__}: {error!s:.200}",
                step=step,
            ) from error
