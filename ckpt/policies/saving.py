"""When to save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ckpt.errors import InvalidArgumentError

__all__ = ["FixedInterval", "SavePolicy"]


class SavePolicy(Protocol):
    """Decides whether a step is saved."""

    def refusal(self, step: int, previous: Sequence[int]) -> str | None:
        """Return why `step` is not to be saved, or None if it is.

        Args:
            step: The step in question.
            previous: The committed steps, ascending.
        """


@dataclass(frozen=True, slots=True)
class FixedInterval:
    """Saves every step that `n` divides.

    Raises:
        InvalidArgumentError: `n` is not a whole number, 1 or greater.
    """

    n: int

    def __post_init__(self) -> None:
        if type(self.n) is not int or self.n < 1:
            raise InvalidArgumentError(f"FixedInterval({self.n!r}): expected a whole number >= 1")

    def refusal(self, step: int, previous: Sequence[int]) -> str | None:
        """Return None for multiples of `n`, else a sentence."""
        if step % self.n == 0:
            return None
        return f"step {step} is not a multiple of {self.n} (FixedInterval)"
