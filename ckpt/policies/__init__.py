"""When to save and what to keep: pure functions of steps, no I/O."""

from __future__ import annotations

from ckpt.policies.preservation import LatestN, PreservationPolicy, PreserveAll
from ckpt.policies.saving import FixedInterval, SavePolicy

__all__ = ["FixedInterval", "LatestN", "PreservationPolicy", "PreserveAll", "SavePolicy"]
