"""What a campaign came to."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field

__all__ = ["Tally"]


@dataclass
class Tally:
    """Counts of one campaign.

    Attributes:
        runs: Saves, restores, processes or states that were tried.
        faults: How many of them met what the campaign does to them; a campaign without is no proof.
        losses: What should not have happened, one line each; a promise holds if there is none.
    """

    runs: int = 0
    faults: int = 0
    losses: list[str] = field(default_factory=list)

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.runs + other.runs, self.faults + other.faults, self.losses + other.losses)

    def lose(self, what: str, error: BaseException, said: str = "") -> None:
        """Count a loss, with the place of the check that failed and what a program said."""
        self.losses.append(f"{what}: {''.join(traceback.format_exception(error))}{said}")

    def check(self, *, faults: int) -> None:
        """Assert that nothing was lost, and that at least so many faults were met."""
        assert self.losses == [], "\n".join(self.losses[:20])
        assert self.faults >= faults, f"only {self.faults} faults were met, so little was tested"
