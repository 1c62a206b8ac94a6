"""Values as JSON can have them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return metrics as JSON can have them: None for those that are not finite."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def time_of(nanoseconds: int) -> datetime | None:
    """Return a time stamp (UTC); None for 0, which stands for one that is not known."""
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC) if nanoseconds else None
