"""Policies: when to save, which steps to keep, and how the others are deleted. No I/O.

When to save: `FixedInterval`, `SpecificSteps`, `Continuous`, `EverySeconds`, `Initial`,
`OnPreemption`, `BoundedOverhead`, `AnySave`, or a function of step, committed steps and context
that returns True for steps to save.

What to keep: `PreserveAll`, `LatestN`, `EveryNSteps`, `EveryNStepsClosest`, `EveryNSeconds`,
`LatestDuration`, `BestN`, `Healthy`, `CustomSteps`, `AnyPreservation`, or a function of a step that
returns True for steps to keep.

`refusal_of` and `steps_kept` ask any of them as the manager does; use them to test policies.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt.policies._context import SaveContext, SavedStep
    from ckpt.policies._deletion import Deletion
    from ckpt.policies._health import Healthy
    from ckpt.policies._intervals import (
        EveryNSeconds,
        EveryNSteps,
        EveryNStepsClosest,
        LatestDuration,
    )
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
    "Healthy",
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


# Imported when they are asked for: a program uses two or three of them.
_HOMES = {
    "AnyPreservation": "ckpt.policies._preservation",
    "AnySave": "ckpt.policies._save_policies",
    "BestN": "ckpt.policies._ranking",
    "BoundedOverhead": "ckpt.policies._overhead",
    "Continuous": "ckpt.policies._save_policies",
    "CustomSteps": "ckpt.policies._preservation",
    "Deletion": "ckpt.policies._deletion",
    "EveryNSeconds": "ckpt.policies._intervals",
    "EveryNSteps": "ckpt.policies._intervals",
    "EveryNStepsClosest": "ckpt.policies._intervals",
    "EverySeconds": "ckpt.policies._save_policies",
    "FixedInterval": "ckpt.policies._save_policies",
    "Healthy": "ckpt.policies._health",
    "Initial": "ckpt.policies._save_policies",
    "LatestDuration": "ckpt.policies._intervals",
    "LatestN": "ckpt.policies._preservation",
    "Metric": "ckpt.policies._ranking",
    "Mode": "ckpt.policies._ranking",
    "OnPreemption": "ckpt.policies._save_policies",
    "PreservationPolicy": "ckpt.policies._preservation",
    "PreservationPolicyLike": "ckpt.policies._preservation",
    "PreserveAll": "ckpt.policies._preservation",
    "SaveContext": "ckpt.policies._context",
    "SavePolicy": "ckpt.policies._save_policies",
    "SavePolicyLike": "ckpt.policies._save_policies",
    "SavedStep": "ckpt.policies._context",
    "SpecificSteps": "ckpt.policies._save_policies",
    "best_of": "ckpt.policies._ranking",
    "check_preservation": "ckpt.policies._preservation",
    "check_save_policy": "ckpt.policies._save_policies",
    "ranking_of": "ckpt.policies._ranking",
    "refusal_of": "ckpt.policies._save_policies",
    "steps_kept": "ckpt.policies._preservation",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ckpt.policies' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
