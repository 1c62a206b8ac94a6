"""The health of steps whose parts are on several disks: an odd leaf on any disk counts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from msgspec import Struct
from msgspec.structs import replace as replaced

from ckpt._steps.index import IndexedStep
from ckpt.keep._questions import SavedStep


class CommonSteps(Struct, frozen=True):
    """The steps that all processes have, by number, ascending.

    Attributes:
        own: The steps as they are on the disk of this process.
        everywhere: The same steps, with the smallest possible number of leaves odd on any disk.
    """

    own: dict[int, IndexedStep]
    everywhere: dict[int, IndexedStep]


def health_on_all(step: IndexedStep, counts: Sequence[tuple[int | None, int]]) -> IndexedStep:
    """Return a step with the health that it has over all disks.

    Args:
        step: The step, as it is on one disk.
        counts: For each disk, the numbers of leaves with odd values and with unequal replicas.
    """
    nonfinite = [each[0] for each in counts]
    most = max((each for each in nonfinite if each is not None), default=None)
    return replaced(
        step,
        nonfinite_leaves=None if None in nonfinite and not most else most,
        unequal_leaves=max(each[1] for each in counts),
    )


def health_data(own: Sequence[SavedStep]) -> Any:
    """Return the JSON value that tells other processes about the leaves of this one's steps.

    The names are sent once: a run that has diverged has the same odd leaves in every step.
    """
    numbers: dict[tuple[str, ...], int] = {}
    steps = [
        [
            each.nonfinite_leaves,
            each.unequal_leaves,
            numbers.setdefault(each.nonfinite, len(numbers)),
            numbers.setdefault(each.unequal, len(numbers)),
            max(each.unknown_leaves, int(each.nonfinite_leaves is None)),
        ]
        for each in own
    ]
    return [list(numbers), steps]


def join_health(own: Sequence[SavedStep], every: Sequence[Any]) -> list[SavedStep]:
    """Return steps with the leaves of all disks: the same on every process.

    Args:
        own: The steps, as they are on the disk of this process.
        every: The `health_data` of every process about the same steps.
    """
    return [
        _join_step(step, [(names, each[at]) for names, each in every])
        for at, step in enumerate(own)
    ]


def _join_step(step: SavedStep, disks: Sequence[tuple[Any, Any]]) -> SavedStep:
    unknown = sum(each[4] for _, each in disks)
    nonfinite, odd = _union([(each[0] or 0, names[each[2]]) for names, each in disks])
    unequal, differing = _union([(each[1], names[each[3]]) for names, each in disks])
    return replace(
        step,
        nonfinite_leaves=None if unknown and not odd else odd,
        unequal_leaves=differing,
        nonfinite=nonfinite,
        unequal=unequal,
        unknown_leaves=unknown,
    )


def _union(disks: Sequence[tuple[int, Sequence[str]]]) -> tuple[tuple[str, ...], int]:
    """Return the names of leaves on any disk, and the number of leaves with unnamed ones.

    A disk whose leaves could not be read gives only their number. These leaves may be the same as
    on another disk, but are counted as others: a leaf without a known name cannot be allowed.
    """
    names = tuple(dict.fromkeys(name for _, each in disks for name in each))
    return names, len(names) + sum(max(0, count - len(each)) for count, each in disks)
