"""How a leaf of one of several items is written: `model:params.w`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckpt._tree.leaf_names import escape_slashes
from ckpt.errors import InvalidArgumentError


def leaf_of_item(item: str, path: str) -> str:
    """Return how a leaf of an item is written, `model:params.w`; without an item, its path."""
    return ":".join(filter(None, (item, path)))


def split_leaf(text: str, items: Iterable[str]) -> tuple[str | None, str]:
    """Return the item and the path, as it is stored, of a leaf such as `model:params.w`.

    Args:
        text: The leaf, or a branch; the name of an item alone is all of it.
        items: The names of the items; none if there is one item, without a name.

    Returns:
        The item, or None if the text names none; and the path, which may be empty after an item.
    """
    for item in sorted(items, key=len, reverse=True):
        if text == item or text.startswith(f"{item}:"):
            return item, escape_slashes(text[len(item) + 1 :])
    return None, escape_slashes(text)


def branch_of(text: str, items: Sequence[str], *, unnamed: bool) -> tuple[str, str]:
    """Return the item and the path of a branch, as `split_leaf` does; one item needs no name.

    Raises:
        InvalidArgumentError: There are several items, and the text names none of them.
    """
    item, path = split_leaf(text, () if unnamed else items)
    if item is not None:
        return item, path
    if not items:
        raise InvalidArgumentError("it has no items")
    if len(items) > 1:
        first, _, below = path.partition(".")
        meant = leaf_of_item(items[0], path.rpartition(":")[2])
        if first in items:
            meant = leaf_of_item(first, below)
        raise InvalidArgumentError(
            f"it has several items ({', '.join(items)}): name one of them, as in {meant!r:.200}"
        )
    return items[0], path
