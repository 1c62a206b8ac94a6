"""Frozen leaves: leaves that the user declares unchanged. Pure.

No result depends on that declaration: it only selects the leaves that are worth a check before they
are copied from their devices.
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
    """The patterns of one save, and the paths that they are to cover.

    Attributes:
        patterns: The patterns of leaf paths.
        paths: The leaf paths of the items so far.
    """

    patterns: tuple[Pattern, ...] = ()
    paths: list[str] = field(default_factory=list)

    def numbers(self, paths: Sequence[str]) -> Sequence[int]:
        """Return the numbers of the leaves of an item that are declared frozen."""
        self.paths += paths
        return _covered(self.patterns, tuple(paths))

    def check_used(self) -> None:
        """Check that every pattern covers a leaf of the save.

        Raises:
            InvalidArgumentError: A pattern does not; suggests the path that was probably meant.
        """
        for pattern in self.patterns:
            if not any(pattern.covers(path) for path in self.paths):
                raise InvalidArgumentError(
                    f"frozen: {pattern.text!r:.80} covers no leaf"
                    f"{near_miss(pattern.text, self.paths)}"
                )


@functools.lru_cache(maxsize=16)
def _covered(patterns: tuple[Pattern, ...], paths: tuple[str, ...]) -> Sequence[int]:
    # Cached: every save of a run asks for the same, while its caller waits.
    return tuple(
        number
        for number, path in enumerate(paths)
        if any(pattern.covers(path) for pattern in patterns)
    )


def frozen_patterns(frozen: object) -> tuple[Pattern, ...]:
    """Return the patterns in `frozen` of `VitalSigns`.

    Raises:
        InvalidArgumentError: The argument has no patterns of leaf paths.
    """
    expected = "a pattern of leaf paths, such as 'base.**', or a list of them"
    if not isinstance(frozen, Iterable) or isinstance(frozen, bytes):
        raise invalid("frozen", frozen, expected, of="VitalSigns")
    texts = [frozen] if isinstance(frozen, str) else list(frozen)
    for text in texts:
        if not isinstance(text, str):
            raise invalid("frozen", text, expected, of="VitalSigns")
    return tuple(map(compile_pattern, texts))


def changed_leaves(numbers: Sequence[int], before: ItemReport, after: ItemReport) -> list[int]:
    """Return the leaves whose bytes differ between two reports of the same plan.

    Args:
        numbers: The leaves to compare.
        before: The report of the step before.
        after: The report of this step.
    """
    known = _digests(numbers, before)
    found = _digests(numbers, after)
    return sorted({key[0] for key, own in found.items() if known.get(key) != own})


def _digests(numbers: Sequence[int], report: ItemReport) -> dict[tuple[int, int], bytes]:
    places = np.flatnonzero(np.isin(report.rows["leaf"], list(numbers)))
    rows: Array = report.rows[places]
    keys = zip(rows["leaf"].tolist(), rows["number"].tolist(), strict=True)
    return dict(zip(keys, map(bytes, report.digests[places]), strict=True))
