"""The leaves of a step with values that are not finite, or with replicas that were not equal."""

from __future__ import annotations

from collections.abc import Iterable

from ckpt._format.manifest import ItemEntry, Manifest
from ckpt._tree.boxes import unboxed_names


def nonfinite_leaves(manifest: Manifest) -> dict[str, int]:
    """Return the number of NaN and infinite values by leaf path, for leaves that have some.

    In a step of several items, the name of the item comes before the path: `model/params.w`.
    """
    found: dict[str, int] = {}
    for name, item in manifest.items.items():
        numbers = item.leaves.nonfinite()
        counts = item.leaves.signs["nonfinite"][numbers].tolist()
        found |= zip(_paths(manifest, name, item, numbers), counts, strict=True)
    return found


def unequal_leaves(manifest: Manifest) -> list[str]:
    """Return the leaves whose replicas were not equal, as in `nonfinite_leaves`."""
    return [
        path
        for name, item in manifest.items.items()
        for path in _paths(manifest, name, item, sorted(item.leaves.unequal))
    ]


def _paths(manifest: Manifest, name: str, item: ItemEntry, numbers: Iterable[int]) -> list[str]:
    start = "" if manifest.unnamed else f"{name}/"
    paths = unboxed_names(item.nodes, item.leaves.names)
    return [f"{start}{paths[number]}" for number in numbers]
