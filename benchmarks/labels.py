"""What rows are called where people read them. The record keeps its own names."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from benchmarks import heartbeat

if TYPE_CHECKING:
    from collections.abc import Mapping

_LABELS: Mapping[str, str] = MappingProxyType(
    {
        "orbax": "Orbax",
        "dcp": "PyTorch DCP",
        "safetensors": "safetensors, fsynced",
        "raw": "one raw file, fsynced",
        heartbeat.NEIGHBOUR: "other process\ndoing the same I/O",
        heartbeat.IDLE: "idle loop",
    }
)


def label(row: str) -> str:
    """Returns what a row is called in a chart."""
    return _LABELS.get(row, row)
