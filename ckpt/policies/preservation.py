"""What to keep after a commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ckpt.errors import InvalidArgumentError

__all__ = ["LatestN", "PreservationPolicy", "PreserveAll"]


class PreservationPolicy(Protocol):
    """Chooses which committed steps stay."""

    def keep(self, steps: Sequence[int]) -> frozenset[int]:
        """Return the steps to keep of `steps`, which are all committed and ascending.

        The manager keeps the greatest step, and the one it has just saved, whatever is returned.
        """


@dataclass(frozen=True, slots=True)
class PreserveAll:
    """Keeps every step."""

    def keep(self, steps: Sequence[int]) -> frozenset[int]:
        """Return all of `steps`."""
        return frozenset(steps)


@dataclass(frozen=True, slots=True)
class LatestN:
    """Keeps the `n` greatest steps.

    Raises:
        InvalidArgumentError: `n` is not a whole number, 1 or greater.
    """

    n: int

    def __post_init__(self) -> None:
        if type(self.n) is not int or self.n < 1:
            raise InvalidArgumentError(f"LatestN({self.n!r}): expected a whole number, 1 or more")

    def keep(self, steps: Sequence[int]) -> frozenset[int]:
        """Return the last `n` of `steps`."""
        return frozenset(steps[-self.n :])
