"""What a save is asked to write: the items, their metrics and metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt._format.manifest import JsonValue

__all__ = ["SaveRequest"]


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What to save and under which name.

    Attributes:
        entry: Name of the entry it becomes.
        step: The step, or None for a one-shot checkpoint.
        items: The objects by item name. Emptied when staging begins: the caller's arrays must not
            be kept alive while they are written.
        unnamed: Whether the caller gave one object without a name.
        metrics: User metrics.
        metadata: User metadata.
        overwrite: Whether an existing entry is replaced.
    """

    entry: str
    step: int | None
    items: dict[str, Any]
    unnamed: bool
    metrics: Mapping[str, Any] | None
    metadata: JsonValue
    overwrite: bool
