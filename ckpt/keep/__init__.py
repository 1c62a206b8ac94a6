"""Which committed steps are kept, and how the others are deleted. No I/O.

`keep=` of a manager is one of these policies, a whole number `n` for `Latest(n)`, or a function of
a step that returns True for steps to keep. `steps_kept` asks any of them as the manager does; use
it to test policies.
"""

from ckpt._api.hints import hinted
from ckpt.keep._deletion import Deletion
from ckpt.keep._health import Healthy
from ckpt.keep._keep_policies import (
    All,
    Any,
    ClosestToEvery,
    EverySeconds,
    EverySteps,
    KeepPolicy,
    KeepPolicyLike,
    Latest,
    Newer,
    Steps,
    check_keep_policy,
    steps_kept,
)
from ckpt.keep._questions import SavedStep
from ckpt.keep._ranking import Best, Metric, Mode, Within, best_of, ranking_of

__all__ = [
    "All",
    "Any",
    "Best",
    "ClosestToEvery",
    "Deletion",
    "EverySeconds",
    "EverySteps",
    "Healthy",
    "KeepPolicy",
    "KeepPolicyLike",
    "Latest",
    "Metric",
    "Mode",
    "Newer",
    "SavedStep",
    "Steps",
    "Within",
    "best_of",
    "check_keep_policy",
    "ranking_of",
    "steps_kept",
]

for _policy in (Best, ClosestToEvery, EverySeconds, EverySteps, Healthy, Latest, Newer, Steps):
    hinted(_policy)


def __dir__() -> list[str]:
    return __all__
