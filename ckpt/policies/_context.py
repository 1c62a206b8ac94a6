"""The input of policies: committed steps, and the circumstances of a decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A step that is committed, or being saved.

    Attributes:
        step: The step.
        time: When its save began, in Unix seconds.
        metrics: The metrics it was saved with, by name (`train/loss` where they are in groups), or
            None.
        nonfinite_leaves: How many leaves have NaN or infinite values; None if that is not known,
            as of a step that was saved without vital signs.
        unequal_leaves: How many leaves had replicas that were not equal, as far as that is known.
        nonfinite: The leaf paths of the former, where they are known, as they are for preservation
            policies; in a step of several items each after the name of its item: `model/params.w`.
        unequal: The leaf paths of the latter.
        groups: The metrics as they were passed, if some are in groups: `{"train": {"loss": 0.5}}`.
        unknown_leaves: How many arrays have no vital signs, at least, in a step whose `nonfinite`
            is known: one that has some is not known to be healthy even if those are allowed.
        left_behind: Whether it is of a branch that the run went back behind, as far as that is
            known, as it is for preservation policies.
    """

    step: int
    time: float
    metrics: Mapping[str, float] | None = None
    nonfinite_leaves: int | None = None
    unequal_leaves: int = 0
    nonfinite: tuple[str, ...] = ()
    unequal: tuple[str, ...] = ()
    unknown_leaves: int = 0
    groups: Mapping[str, Any] | None = None
    left_behind: bool = False


@dataclass(frozen=True, slots=True)
class SaveContext:
    """The circumstances in which a save policy decides.

    Measured times are medians of the last few values, and None until there is one.

    Attributes:
        now: The time, in Unix seconds.
        preempted: Whether the run ends at this step; see `reached_preemption`.
        saving: Saves under way, in the order in which they began.
        last_time: When the newest save of this manager, committed or under way, began, in Unix
            seconds; None if there is none.
        step_seconds: Time from one training step to the next while nothing is being saved; known
            if `save` or `should_save` is called at every step.
        lost_seconds: Training time that one save costs: the call of `save`, and how much it slows
            down the steps beside it.
        save_seconds: Time from the call of `save` to the commit.
    """

    now: float
    preempted: bool = False
    saving: tuple[SavedStep, ...] = ()
    last_time: float | None = None
    step_seconds: float | None = None
    lost_seconds: float | None = None
    save_seconds: float | None = None
