"""Unchanged leaves, found on their devices: no array is copied to the host for that."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ckpt._engine.signs.device_pass import begin_pass
from ckpt._engine.signs.kernels import Kernels
from ckpt._plan.chunking import LeafPlan
from ckpt._plan.item_reports import ItemReport
from ckpt._settings import SignsPlace

# Only exact signs can prove equality; norms depend on the order of summation.
_EXACT = ("fingerprint", "nonfinite", "absmax")


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
    if not len(before.signs):
        return []
    others = set(range(len(plans))) - set(candidates)
    passed = begin_pass(place, plans, leaves, others, kernels)
    found = []
    # Digests find unchanged leaves among the others.
    for leaf in sorted(passed.looked_at):
        places = np.flatnonzero(before.rows["leaf"] == leaf)
        numbers = before.rows["number"][places].tolist()
        records = [passed.record(leaf, number) for number in numbers]
        pairs = zip(records, before.signs[places], strict=True)
        if records and all(
            own is not None
            and known["norm"] >= 0
            and all((own[name] == known[name]).all() for name in _EXACT)
            for own, known in pairs
        ):
            found.append(leaf)
    return found
