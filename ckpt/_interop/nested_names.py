"""A tree from flat names, split at their separators."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from ckpt._redaction import redact
from ckpt._tree.leaf_names import MAX_DEPTH
from ckpt.errors import UnsupportedFormatError

logger = logging.getLogger("ckpt")


def nested(names: Mapping[str, Any], where: str, separators: str = ".") -> Mapping[str, Any]:
    """Return a tree from values with flat names.

    `{"a.b": 1, "a.c": 2}` becomes `{"a": {"b": 1, "c": 2}}`. If one name is a prefix of another,
    the names stay flat, and a warning says so.

    Args:
        names: The values, by flat name.
        where: The file, for messages.
        separators: The characters at which names are split.

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
        logger.warning(
            "%s: some names are parts of others, so the names are the keys of one dict",
            redact(where),
        )
        return names
    tree: dict[str, Any] = {}
    for name, value in names.items():
        *keys, last = paths[name]
        node = tree
        for key in keys:
            node = node.setdefault(key, {})
        node[last] = value
    return tree
