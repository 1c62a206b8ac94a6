"""Frozen leaves: leaves that the user declares unchanged, checked on their devices.

No result depends on that declaration: it only selects the leaves that are worth a check before they
are copied from their devices.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from ckpt._arguments import invalid
from ckpt._plan.chunking import LeafPlan
from ckpt._plan.item_reports import ItemReport
from ckpt._settings import SignsPlace
from ckpt._tree.patterns import Pattern, compile_pattern
from ckpt._vitals.extension.device_pass import begin_pass
from ckpt._vitals.extension.kernels import Kernels
from ckpt._vitals.extension.merged_signs import NAME
from ckpt._vitals.records import Array

# Only exact signs can prove equality; norms depend on the order of summation.
_EXACT = ("fingerprint", "nonfinite", "absmax")


@functools.lru_cache(maxsize=16)
def covered(patterns: tuple[Pattern, ...], paths: tuple[str, ...]) -> Sequence[int]:
    """Return the numbers of the paths that patterns cover."""
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


def unchanged_leaves(
    candidates: Collection[int],
    place: SignsPlace,
    plans: Sequence[LeafPlan],
    leaves: Sequence[Any],
    before: ItemReport,
    kernels: Kernels,
) -> list[int]:
    """Return the leaves whose chunks all have the vital signs that they had in the step before.

    Waits for the devices. Leaves whose signs the devices do not take are left out, and so are
    leaves whose earlier signs are unknown.

    Args:
        candidates: Numbers of the leaves to check.
        place: Place where vital signs are taken.
        plans: The plans of all leaves.
        leaves: The leaves.
        before: The report of this process on the step before.
        kernels: The kernels compiled so far.
    """
    notes = before.notes.get(NAME)
    if notes is None:
        return []
    others = set(range(len(plans))) - set(candidates)
    passed = begin_pass(place, plans, leaves, others, kernels)
    found = []
    # Digests find unchanged leaves among the others.
    for leaf in sorted(passed.looked_at):
        places = np.flatnonzero(before.rows["leaf"] == leaf)
        numbers = before.rows["number"][places].tolist()
        records = [passed.record(leaf, number) for number in numbers]
        pairs = zip(records, notes.records[places], strict=True)
        if records and all(
            own is not None
            and known["norm"] >= 0
            and all((own[name] == known[name]).all() for name in _EXACT)
            for own, known in pairs
        ):
            found.append(leaf)
    return found
