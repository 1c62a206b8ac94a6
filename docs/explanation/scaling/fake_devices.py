"""Simulated devices, for jobs larger than any machine: enough to make meshes and shardings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["FakeDevice", "devices_of"]


@dataclass(frozen=True)
class _Memory:
    kind: str = "device"


@dataclass(frozen=True)
class _Client:
    number: int
    platform: str = "cpu"

    def process_index(self) -> int:
        return self.number


class FakeDevice:
    """A device of process `process_index`. jax makes shardings of it, but no arrays."""

    platform = "cpu"
    device_kind = "cpu"

    def __init__(self, number: int, process: int) -> None:
        self.id = number
        self.process_index = process
        self.client = _Client(process)

    def __repr__(self) -> str:
        return f"FakeDevice({self.id})"

    def default_memory(self) -> _Memory:
        """Returns the memory that arrays lie in."""
        return _Memory()

    def addressable_memories(self) -> list[_Memory]:
        """Returns all kinds of memory."""
        return [_Memory()]


def devices_of(processes: int, each: int) -> Any:
    """Returns the devices of a job, `[processes * each]`, process by process."""
    found = np.empty(processes * each, dtype=object)
    found[:] = [FakeDevice(number, number // each) for number in range(processes * each)]
    return found
