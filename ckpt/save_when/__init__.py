"""When a step is saved. No I/O.

`save_when=` of a manager is one of these policies, or a function of step, committed steps and
`SaveContext` that returns True for steps to save. `refusal_of` asks any of them as the manager
does; use it to test policies.
"""

from ckpt._api.hints import hinted
from ckpt.save_when._save_policies import (
    Any,
    BoundedOverhead,
    Continuously,
    EverySeconds,
    EverySteps,
    First,
    Preempted,
    SaveContext,
    SavePolicy,
    SavePolicyLike,
    Steps,
    check_save_policy,
    refusal_of,
)

__all__ = [
    "Any",
    "BoundedOverhead",
    "Continuously",
    "EverySeconds",
    "EverySteps",
    "First",
    "Preempted",
    "SaveContext",
    "SavePolicy",
    "SavePolicyLike",
    "Steps",
    "check_save_policy",
    "refusal_of",
]

for _policy in (BoundedOverhead, Continuously, EverySeconds, EverySteps, Preempted, Steps):
    hinted(_policy)


def __dir__() -> list[str]:
    return __all__
