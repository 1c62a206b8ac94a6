"""Values in a form that JSON can express."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return metrics in a form that JSON can express: None for values that are not finite."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def json_text(record: object) -> str:
    """Return a record as JSON. Bytes of paths that are not UTF-8 are escaped."""
    try:
        return msgspec.json.encode(record).decode()
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(record), separators=(",", ":"))


def time_of(nanoseconds: int) -> datetime | None:
    """Return a time stamp (UTC); None for 0, which stands for an unknown time."""
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC) if nanoseconds else None


def age_of(nanoseconds: int) -> float | None:
    """Return the seconds since a time stamp; None for 0, which stands for an unknown time."""
    return max(time.time() - nanoseconds / 1e9, 0.0) if nanoseconds else None
