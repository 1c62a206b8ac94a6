"""Packed leaves that lie side by side: read as one run, cut apart, checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpt._engine.restore.checks import DamagedLeaves, digest_error
from ckpt._format.digests import digest
from ckpt._format.dtypes import parse_dtype
from ckpt._format.manifest import LeafEntry
from ckpt._plan.targets import ArrayRead

__all__ = ["PackedRead", "Run", "cut_run", "parts_of", "runs_of"]

Array = np.ndarray[Any, Any]

# Packed leaves that are not wanted are read over if there is not more than this between two that
# are: a device does not read less at a time.
_MOST_SKIPPED = 64 << 10


@dataclass(frozen=True, slots=True)
class PackedRead:
    """A whole packed leaf to read.

    Attributes:
        number: Number of the read.
        read: What it comes back as.
        leaf: The stored leaf's entry.
    """

    number: int
    read: ArrayRead
    leaf: LeafEntry


@dataclass(slots=True)
class Run:
    """Packed leaves that lie side by side in one data file."""

    file: int
    start: int
    end: int
    leaves: list[PackedRead]


def runs_of(wanted: Sequence[PackedRead], limit: int) -> Iterator[Run]:
    """Yield located packed leaves as runs of at most about `limit` bytes."""
    run: Run | None = None
    for each in sorted(wanted, key=_place_of):
        file, start = _place_of(each)
        end = start + _nbytes(each.leaf)
        near = run is not None and run.file == file and start - run.end <= _MOST_SKIPPED
        if run is not None and near and end - run.start <= limit:
            run.end = max(run.end, end)
            run.leaves.append(each)
            continue
        if run is not None:
            yield run
        run = Run(file, start, end, [each])
    if run is not None:
        yield run


def parts_of(run: Run) -> Iterator[tuple[LeafEntry, slice]]:
    """Yield the leaves of a run, each with the part of the run that it is."""
    for each in run.leaves:
        start = each.leaf.offsets[0] - run.start
        yield each.leaf, slice(start, start + _nbytes(each.leaf))


def _place_of(each: PackedRead) -> tuple[int, int]:
    return each.leaf.files[0] if each.leaf.files else 0, each.leaf.offsets[0]


def _nbytes(leaf: LeafEntry) -> int:
    nbytes = parse_dtype(leaf.dtype).itemsize
    for length in leaf.shape:
        nbytes *= length
    return nbytes


def cut_run(run: Run, memory: Array) -> list[Array]:
    """Return the leaves of a run, checked.

    Each in memory of its own: jax takes over what it is given, and a single scalar that lives on
    would keep the whole run alive.

    Raises:
        ExceptionGroup: Of one `CorruptCheckpointError` for every leaf whose bytes were changed.
    """
    arrays = []
    damage = DamagedLeaves()
    for leaf, place in parts_of(run):
        part = memory[place]
        error = digest_error(leaf, 0, digest(part.data))
        if error is not None:
            damage.note(error)
        array: Array = np.ndarray(leaf.shape, parse_dtype(leaf.dtype), part)
        arrays.append(array.copy())
    damage.told()
    return arrays
