"""Leaves that are what they were, as their devices find: nothing is copied to the host for that."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ckpt._engine.signs.device_pass import begin_pass
from ckpt._engine.signs.kernels import Kernels
from ckpt._plan.chunking import LeafPlan
from ckpt._plan.item_reports import ItemReport
from ckpt._settings import VitalSignsMode

# What is exact however it was computed; norms are not.
_EXACT = ("fingerprint", "nonfinite", "absmax")


def unchanged_leaves(
    candidates: Collection[int],
    mode: VitalSignsMode,
    plans: Sequence[LeafPlan],
    leaves: Sequence[Any],
    before: ItemReport,
    kernels: Kernels,
) -> list[int]:
    """Return the leaves of which every chunk has the vital signs that it had in the step before.

    Waits for the devices. Leaves that devices take no vital signs of are not among them, nor are
    those whose vital signs were not known.

    Args:
        candidates: Numbers of the leaves to look at.
        mode: Where vital signs are taken.
        plans: The plans of all leaves.
        leaves: The leaves.
        before: What this process has written of the step before, or taken over.
        kernels: The kernels that are there.
    """
    if not len(before.signs):
        return []
    others = set(range(len(plans))) - set(candidates)
    passed = begin_pass(mode, plans, leaves, others, kernels)
    if passed is None:
        return []
    found = []
    # The others are told by their digests.
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
