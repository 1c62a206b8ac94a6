"""What policies are told: committed steps, and the moment in which a decision is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["SaveContext", "SavedStep"]


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A step that is committed, or being saved.

    Attributes:
        step: The step.
        time: When its save began, in Unix seconds.
        metrics: The metrics it was saved with, or None.
    """

    step: int
    time: float
    metrics: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class SaveContext:
    """The moment in which a save is decided about.

    What is measured is None until there is something to measure; the figures are medians of the
    last few.

    Attributes:
        now: Unix seconds.
        preempted: Whether the run is to end at this step; see `reached_preemption`.
        saving: Saves under way, in the order in which they were begun.
        last_time: When the newest save of this manager that is committed or under way began, in
            Unix seconds; None if there is none.
        step_seconds: Time from one training step to the next while nothing is saved, as far as the
            manager is asked about every step.
        lost_seconds: Training time that one save takes: the call of `save`, and what it slows down
            the steps beside it.
        save_seconds: Time from the call of `save` to the commit.
    """

    now: float
    preempted: bool = False
    saving: tuple[SavedStep, ...] = ()
    last_time: float | None = None
    step_seconds: float | None = None
    lost_seconds: float | None = None
    save_seconds: float | None = None
