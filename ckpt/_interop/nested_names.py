"""Names with separators in them, taken apart: a tree of what a file has under flat names. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckpt._tree.leaf_names import MAX_DEPTH
from ckpt.errors import UnsupportedFormatError


def nested(names: Mapping[str, Any], where: str, separators: str = ".") -> dict[str, Any] | None:
    """Return a tree of what has names with separators; None if one name is part of another.

    `{"a.b": 1, "a.c": 2}` becomes `{"a": {"b": 1, "c": 2}}`.

    Args:
        names: What there is, by name.
        where: The file, for messages.
        separators: The characters at which names are taken apart.

    Raises:
        UnsupportedFormatError: A name has more parts than any tree has levels.
    """
    between = re.compile(f"[{re.escape(separators)}]")
    paths = {name: tuple(between.split(name)) for name in names}
    deep = next((name for name, path in paths.items() if len(path) > MAX_DEPTH), None)
    if deep is not None:
        count = len(paths[deep])
        raise UnsupportedFormatError(
            f"{where}: its name has {count} parts, and no tree is deeper than {MAX_DEPTH} levels",
            leaf=deep,
        )
    leaves = set(paths.values())
    inner = {path[:end] for path in leaves for end in range(1, len(path))}
    # With several separators, two names may be the same path.
    if inner & leaves or len(leaves) != len(paths):
        return None
    tree: dict[str, Any] = {}
    for name, value in names.items():
        *keys, last = paths[name]
        node = tree
        for key in keys:
            node = node.setdefault(key, {})
        node[last] = value
    return tree
