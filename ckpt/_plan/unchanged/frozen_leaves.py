"""Frozen leaves: those that the user says do not change. Pure.

Nothing rests on what the user says: it only tells which leaves are worth a look before they are
copied from their devices.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct, field

from ckpt._arguments import invalid
from ckpt._plan.item_reports import Array, ItemReport
from ckpt._tree.patterns import Pattern, compile_pattern
from ckpt._tree.suggestions import near_miss
from ckpt.errors import InvalidArgumentError


class FrozenLeaves(Struct):
    """The patterns of one save.

    Attributes:
        patterns: The patterns of leaf paths.
        paths: The leaf paths of the items so far.
    """

    patterns: tuple[Pattern, ...] = ()
    paths: list[str] = field(default_factory=list)

    def numbers(self, paths: Sequence[str]) -> Sequence[int]:
        """Return the numbers of the leaves of an item that are said to be frozen."""
        self.paths += paths
        return _covered(self.patterns, tuple(paths))

    def check_used(self) -> None:
        """Check that every pattern covers a leaf of the save.

        Raises:
            InvalidArgumentError: One does not; says what was probably meant.
        """
        for pattern in self.patterns:
            if not any(pattern.covers(path) for path in self.paths):
                raise InvalidArgumentError(
                    f"frozen: {pattern.text!r:.80} covers no leaf"
                    f"{near_miss(pattern.text, self.paths)}"
                )


@functools.lru_cache(maxsize=16)
def _covered(patterns: tuple[Pattern, ...], paths: tuple[str, ...]) -> Sequence[int]:
    # Every save of a run asks for the same, while its caller waits.
    return tuple(
        number
        for number, path in enumerate(paths)
        if any(pattern.covers(path) for pattern in patterns)
    )


def frozen_patterns(frozen: object) -> tuple[Pattern, ...]:
    """Return the patterns that a manager was given.

    Raises:
        InvalidArgumentError: They are not patterns of leaf paths.
    """
    given = (frozen,) if isinstance(frozen, str) else frozen
    if not isinstance(given, Iterable) or isinstance(given, bytes):
        raise invalid("frozen", frozen, "a pattern of leaf paths, or a list of them")
    texts = list(given)
    for text in texts:
        if not isinstance(text, str):
            raise invalid("frozen", text, "a pattern of leaf paths, such as 'base.**'")
    return tuple(map(compile_pattern, texts))


def changed_leaves(numbers: Sequence[int], before: ItemReport, after: ItemReport) -> list[int]:
    """Return which leaves have other bytes in one report than in another of the same plan.

    Args:
        numbers: The leaves to look at.
        before: What the step before has of them.
        after: What this one has.
    """
    known = _digests(numbers, before)
    found = _digests(numbers, after)
    return sorted({key[0] for key, own in found.items() if known.get(key) != own})


def _digests(numbers: Sequence[int], report: ItemReport) -> dict[tuple[int, int], bytes]:
    places = np.flatnonzero(np.isin(report.rows["leaf"], list(numbers)))
    rows: Array = report.rows[places]
    keys = zip(rows["leaf"].tolist(), rows["number"].tolist(), strict=True)
    return dict(zip(keys, map(bytes, report.digests[places]), strict=True))
