"""`checkpoint`: the tree of an item in one file of msgpack, as the oldest versions wrote it. Pure.

It has the whole tree. A leaf in it is its value, or a text that says which array stands for it.
Versions that write `_METADATA` too keep there only leaves that were to be aggregated.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ckpt._interop.flax.packed_tree import PackedArray, parse_msgpack
from ckpt._interop.orbax.tree import UNKNOWN, Param

_PREFIXES = ("PLACEHOLDER://", "AGGREGATED://")
# The bytes that dicts, lists and values of these kinds begin with.
_FIRST_BYTES = frozenset([*range(0x80, 0xA0), *range(0xDC, 0xE0), *range(0xC7, 0xCA)])


def may_be_packed(head: bytes) -> bool:
    """Tell whether a file that begins with these bytes may be such a tree.

    TensorFlow has text files of the same name.
    """
    return bool(head) and head[0] in _FIRST_BYTES


def parse_packed(data: bytes, path: str, tree: Any = None) -> Any:
    """Return the tree in such a file.

    Its leaves are a `Param` for each array of its own, a `PackedArray`, or a number or text.

    Args:
        data: The file.
        path: Where it is.
        tree: The tree of `_METADATA`, which then gets the values that it does not have.

    Raises:
        CorruptCheckpointError: The file is damaged.
        UnsupportedFormatError: It is a pickle.
    """
    packed = parse_msgpack(data, path, _param)
    return packed if tree is None else _filled(tree, packed)


def _param(node: Any, keys: tuple[str, ...]) -> Any:
    """Return a `Param` wherever an array of its own stands for a leaf.

    Raises:
        ValueError: A dict has keys that are no texts, which Orbax never wrote.
    """
    if isinstance(node, dict):
        wrong = next((key for key in node if not isinstance(key, str)), None)
        if wrong is not None:
            raise ValueError(f"it has the key {wrong!r:.60}")
        if node.get("driver") == "zarr" and isinstance(node.get("kvstore"), dict):
            # The very first versions wrote how TensorStore opens it.
            return Param(".".join(keys), UNKNOWN)
    if isinstance(node, str) and node.startswith(_PREFIXES):
        return Param(node.partition("://")[2], UNKNOWN)
    return node


def _filled(tree: Any, packed: Any) -> Any:
    """Return a tree of `_METADATA` with the values that a file of msgpack has for its leaves."""
    if isinstance(tree, Param):
        if not tree.is_packed or isinstance(packed, Param):
            return tree
        return replace(packed, kind=tree.kind) if isinstance(packed, PackedArray) else packed
    if isinstance(tree, dict) and isinstance(packed, dict):
        return {
            key: _filled(child, packed[key]) if key in packed else child
            for key, child in tree.items()
        }
    if isinstance(tree, list) and isinstance(packed, list) and len(tree) == len(packed):
        return [_filled(child, other) for child, other in zip(tree, packed, strict=True)]
    return tree
