"""Tables of leaves with vital signs, as a save that takes them writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ckpt._format.leaf_table import LeafEntry, LeafTable
from ckpt._vitals.signs import SIGNS, Array, LeafSigns, no_signs
from ckpt._vitals.stored_signs import StoredSigns, signs_in


def signed(
    leaves: Iterable[LeafEntry],
    signs: Sequence[LeafSigns | None],
    unequal: Mapping[int, tuple[int, ...]] | None = None,
) -> LeafTable:
    """Return a table of leaves, each with its vital signs."""
    records = np.array([record_of(each) for each in signs], SIGNS)
    return StoredSigns(records, unequal or {}).on(LeafTable.of(leaves))


def signs_of_leaves(table: LeafTable) -> list[LeafSigns | None]:
    """Return the vital signs of each leaf."""
    stored = signs_in(table)
    return [stored.of(number) for number in range(len(table))]


def record_of(signs: LeafSigns | None) -> Array:
    """Return the record of signs; the inverse of `signs_of`."""
    if signs is None:
        return no_signs(1).reshape(())
    words = int(signs.fingerprint[8:], 16), int(signs.fingerprint[:8], 16)
    return np.array((words, signs.nonfinite, signs.norm, signs.absmax), SIGNS)
