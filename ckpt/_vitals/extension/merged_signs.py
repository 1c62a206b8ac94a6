"""The signs of the chunks of all writers of an item, merged into those of its leaves. Pure."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from ckpt._format.leaf_table import LeafTable
from ckpt._format.manifest import ItemEntry
from ckpt._plan.item_reports import MergedNotes
from ckpt._vitals.signs import Array, join_signs, no_signs

logger = logging.getLogger("ckpt")

# Name of the extension in reports.
NAME = "vital_signs"
# Most leaves that a warning names.
_NAMED = 5


def with_signs(table: LeafTable, merged: MergedNotes) -> LeafTable:
    """Return a table with the vital signs of its leaves, and those whose replicas differ."""
    signs = None
    if len(merged.notes.records):
        signs = join_signs(merged.notes.records, merged.leaves, len(table))
        # For a leaf that is partly on the disks of other processes these are but a part.
        signs[~merged.are_whole] = no_signs(1)
        # Values are also stored as arrays, but only for other readers.
        signs[list(table.values)] = no_signs(1)
        signs[list(table.same_as)] = signs[list(table.same_as.values())]
    unequal = unequal_leaves(merged.notes.others)
    for number, source in table.same_as.items():
        if source in unequal:
            unequal[number] = unequal[source]
    return LeafTable(
        table.names,
        table.forms,
        table.form,
        table.digests,
        table.offsets,
        table.files,
        table.lengths,
        table.same_as,
        table.values,
        signs,
        unequal,
    )


def warn_of_unequal(entries: Mapping[str, ItemEntry]) -> None:
    """Warn of leaves of which processes should hold the same values, and do not."""
    unequal = [
        f"{entry.leaves.names[leaf]!r} of {name!r} (process {', '.join(map(str, processes))})"
        for name, entry in entries.items()
        for leaf, processes in entry.leaves.unequal.items()
    ]
    if unequal:
        logger.warning(
            "processes that should hold the same values do not, so what is saved may be wrong: "
            "%s. A device may be faulty, or the program lets its replicas drift apart",
            first_names(unequal),
        )


def first_names(names: Sequence[str]) -> str:
    """Return the first names for a warning, and how many more there are."""
    more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def unequal_leaves(copies: Array) -> dict[int, tuple[int, ...]]:
    """Return the leaves whose replicas differ, by number, each with processes that have others.

    These are the processes with another fingerprint than most; if no fingerprint has the most
    holders, all of them.
    """
    keys = copies["leaf"].astype(np.uint64) << np.uint64(32) | copies["number"]
    words, processes = copies["fingerprint"].astype(np.uint64), copies["process"]
    prints = words[:, 1] << np.uint64(32) | words[:, 0]
    order = np.lexsort((prints, keys))
    keys, prints, processes = keys[order], prints[order], processes[order]
    # Chunks with several fingerprints: two neighbours of one chunk that differ.
    differ = (keys[1:] == keys[:-1]) & (prints[1:] != prints[:-1])
    found: dict[int, set[int]] = {}
    for key in np.unique(keys[1:][differ]).tolist():
        start, stop = np.searchsorted(keys, (key, key + 1))
        values, counts = np.unique(prints[start:stop], return_counts=True)
        most = values[counts == counts.max()]
        is_other = prints[start:stop] != most[0] if len(most) == 1 else np.ones(stop - start, bool)
        found.setdefault(key >> 32, set()).update(processes[start:stop][is_other].tolist())
    return {leaf: tuple(sorted(each)) for leaf, each in sorted(found.items())}
