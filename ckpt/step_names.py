"""How the directories of steps are called."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, cast

from ckpt.errors import InvalidArgumentError

__all__ = ["Composite", "Standard", "StepNames", "checked"]

_PREFIX = re.compile(r"^[A-Za-z][A-Za-z0-9_.-]{0,99}\Z")
# Nineteen digits hold every step a 64-bit counter can.
_MOST_DIGITS = 19
_NUMBER = re.compile(r"^[0-9]{1,19}\Z")
# A directory of any other name could lead elsewhere, be hidden, or be taken for something else.
_ENTRY = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.=+,@-]{0,149}\Z")
_TAKEN = frozenset({"metadata"})
_UNFINISHED = ".orbax-checkpoint-tmp"


class StepNames(Protocol):
    """Names steps, and knows their names again. Pure."""

    def name(self, step: int) -> str:
        """Return the name of the directory that `step` is written to."""

    def step(self, name: str) -> int | None:
        """Return the step whose directory may be called `name`, or None if it is none."""


@dataclass(frozen=True, slots=True)
class Standard:
    """Decimal numbers, padded with zeros if wanted, after a prefix and `_` if there is one.

    `Standard("ckpt", 8)` names step 100 `ckpt_00000100`, as Orbax does with `step_prefix="ckpt"`
    and `step_format_fixed_length=8`.

    Attributes:
        prefix: What stands before the `_`; empty for the number alone.
        digits: How many digits there are at least; 0 pads nothing.

    Raises:
        InvalidArgumentError: The prefix cannot begin the name of a directory, or `digits` is not a
            whole number from 0 to 19.
    """

    prefix: str = ""
    digits: int = 0

    def __post_init__(self) -> None:
        prefix: object = self.prefix
        fits = isinstance(prefix, str) and (not prefix or _PREFIX.match(prefix))
        if not fits or _UNFINISHED in self.prefix:
            raise InvalidArgumentError(
                f"Standard(prefix={self.prefix!r:.120}): expected up to 100 letters, digits, '_', "
                "'-' or '.', of which the first is a letter"
            )
        if type(self.digits) is not int or not 0 <= self.digits <= _MOST_DIGITS:
            raise InvalidArgumentError(
                f"Standard(digits={self.digits!r:.120}): expected a whole number from 0 to "
                f"{_MOST_DIGITS}"
            )

    def name(self, step: int) -> str:
        """Return the name of the directory that `step` is written to."""
        return f"{self.prefix}_{step:0{self.digits}d}" if self.prefix else f"{step:0{self.digits}d}"

    def step(self, name: str) -> int | None:
        """Return the step that has this name, or None."""
        number = name.removeprefix(f"{self.prefix}_") if self.prefix else name
        if not _NUMBER.match(number):
            return None
        step = int(number)
        # Two names of one step would be two steps of one name.
        return step if self.name(step) == name else None


class Composite:
    """Writes the names of one kind and reads those of several, for a root that changes over.

    Where a step is there under several names, the one that is written now counts.

    Args:
        write: Gives the names of new steps, and reads them.
        read: Read, too.
    """

    def __init__(self, write: StepNames, *read: StepNames) -> None:
        self._write, *self._read = (checked(each) for each in (write, *read))

    def name(self, step: int) -> str:
        """Return the name of the directory that `step` is written to."""
        return self._write.name(step)

    def step(self, name: str) -> int | None:
        """Return the step that has this name in any of the formats, or None."""
        for each in (self._write, *self._read):
            step = each.step(name)
            if step is not None:
                return step
        return None

    def __repr__(self) -> str:
        return f"Composite({', '.join(map(repr, (self._write, *self._read)))})"


def checked(names: object) -> StepNames:
    """Return `names` so that each answer is one that can be used.

    Raises:
        InvalidArgumentError: It has no methods `name` and `step`. Those of the result raise it
            where `names` raises, names a step in a way that no directory can be called or that it
            reads as another step, or gives something else than a step.
    """
    if type(names) is Standard:
        return names
    if isinstance(names, type) or not (
        callable(getattr(names, "name", None)) and callable(getattr(names, "step", None))
    ):
        raise InvalidArgumentError(
            f"step_names={names!r:.120}: expected an object with the methods name(step) and "
            "step(name), such as ckpt.step_names.Standard('ckpt', 8)"
        )
    return _Checked(cast(StepNames, names))


class _Checked:
    """Step names of somebody else, each answer checked."""

    def __init__(self, names: StepNames) -> None:
        self._names = names

    def name(self, step: int) -> str:
        with self._translated(step):
            name: object = self._names.name(step)
        usable = isinstance(name, str) and _ENTRY.match(name) and _UNFINISHED not in name
        if not isinstance(name, str) or not usable or name in _TAKEN:
            raise InvalidArgumentError(
                f"step_names: {self._names!r:.120} names it {name!r:.160}; expected 1 to 150 "
                "letters, digits or characters of '_.=+,@-', beginning with a letter, a digit or "
                "'_', and not 'metadata'",
                step=step,
            )
        if (read := self.step(name)) != step:
            raise InvalidArgumentError(
                f"step_names: {self._names!r:.120} names it {name!r} and reads that as {read}",
                step=step,
            )
        return name

    def step(self, name: str) -> int | None:
        # Nothing else can be the directory of a step, so nobody needs to be asked.
        if not _ENTRY.match(name) or name in _TAKEN:
            return None
        with self._translated(None):
            step: object = self._names.step(name)
        if step is None or (type(step) is int and 0 <= step < 10**_MOST_DIGITS):
            return step
        raise InvalidArgumentError(
            f"step_names: {self._names!r:.120} reads {name!r} as {step!r:.60}; expected a whole "
            "number, 0 or greater, or None"
        )

    @contextlib.contextmanager
    def _translated(self, step: int | None) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise InvalidArgumentError(
                f"step_names: {self._names!r:.120} raised {type(error).__name__}: {error!s:.200}",
                step=step,
            ) from error
