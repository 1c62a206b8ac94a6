"""Policies: when to save, which steps to keep, and how the others are deleted. No I/O.

When to save: `FixedInterval`, `SpecificSteps`, `Continuous`, `EverySeconds`, `Initial`,
`OnPreemption`, `BoundedOverhead`, `AnySave`, or a function of step, committed steps and context
that returns True for steps to save.

What to keep: `PreserveAll`, `LatestN`, `EveryNSteps`, `EveryNStepsClosest`, `EveryNSeconds`,
`LatestDuration`, `BestN`, `CustomSteps`, `AnyPreservation`, or a function of a step that returns
True for steps to keep.

`refusal_of` and `steps_kept` ask any of them as the manager does; use them to test policies.
"""

from __future__ import annotations

from ckpt.policies._context import SaveContext, SavedStep
from ckpt.policies._deletion import Deletion
from ckpt.policies._intervals import EveryNSeconds, EveryNSteps, EveryNStepsClosest, LatestDuration
from ckpt.policies._overhead import BoundedOverhead
from ckpt.policies._preservation import (
    AnyPreservation,
    CustomSteps,
    LatestN,
    PreservationPolicy,
    PreservationPolicyLike,
    PreserveAll,
    check_preservation,
    steps_kept,
)
from ckpt.policies._ranking import BestN, Metric, Mode, best_of, ranking_of
from ckpt.policies._save_policies import (
    AnySave,
    Continuous,
    EverySeconds,
    FixedInterval,
    Initial,
    OnPreemption,
    SavePolicy,
    SavePolicyLike,
    SpecificSteps,
    check_save_policy,
    refusal_of,
)

__all__ = [
    "AnyPreservation",
    "AnySave",
    "BestN",
    "BoundedOverhead",
    "Continuous",
    "CustomSteps",
    "Deletion",
    "EveryNSeconds",
    "EveryNSteps",
    "EveryNStepsClosest",
    "EverySeconds",
    "FixedInterval",
    "Initial",
    "LatestDuration",
    "LatestN",
    "Metric",
    "Mode",
    "OnPreemption",
    "PreservationPolicy",
    "PreservationPolicyLike",
    "PreserveAll",
    "SaveContext",
    "SavePolicy",
    "SavePolicyLike",
    "SavedStep",
    "SpecificSteps",
    "best_of",
    "check_preservation",
    "check_save_policy",
    "ranking_of",
    "refusal_of",
    "steps_kept",
]


def __dir__() -> list[str]:
    return __all__
