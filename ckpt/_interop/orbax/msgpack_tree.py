"""`checkpoint`: the tree of an item in one msgpack file, as T5X and old versions wrote it. Pure.

The file has the whole tree. Each leaf is a value, or a text that names the array for the leaf.
Versions that also write `_METADATA` keep in this file only leaves that were to be aggregated.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ckpt._interop.flax.packed_tree import PackedArray, parse_msgpack
from ckpt._interop.orbax.tree import UNKNOWN, Param

_PREFIXES = ("PLACEHOLDER://", "AGGREGATED://")
# First bytes of dicts, lists and the extension values of arrays.
_FIRST_BYTES = frozenset([*range(0x80, 0xA0), *range(0xDC, 0xE0), *range(0xC7, 0xCA)])


def may_be_packed(head: bytes) -> bool:
    """Return True if a file with these first bytes may be such a tree.

    TensorFlow has text files of the same name.
    """
    return bool(head) and head[0] in _FIRST_BYTES


def parse_packed(data: bytes, path: str, tree: Any = None) -> Any:
    """Return the tree in such a file.

    Its leaves are a `Param` for each separate array, a `PackedArray`, or a number or text.

    Args:
        data: Content of the file.
        path: Path of the file, for messages.
        tree: The tree of `_METADATA`, which then gets its missing values.

    Raises:
        CorruptCheckpointError: The file is damaged.
        UnsupportedFormatError: The file is a pickle.
    """
    packed = parse_msgpack(data, path, _param)
    return packed if tree is None else _filled(tree, packed)


def _param(node: Any, keys: tuple[str, ...]) -> Any:
    """Return a `Param` for a leaf with a separate array, and any other node as it is.

    Raises:
        ValueError: A dict has keys that are not texts, which Orbax never wrote.
    """
    if isinstance(node, dict):
        wrong = next((key for key in node if not isinstance(key, str)), None)
        if wrong is not None:
            raise ValueError(f"it has the key {wrong!r:.60}")
        kvstore = node.get("kvstore")
        if node.get("driver") == "zarr" and isinstance(kvstore, dict):
            # A spec for TensorStore: T5X gives the name in the checkpoint, and the very first
            # versions of Orbax gave the place on the disk.
            name = str(kvstore.get("path") or node.get("path") or "").removesuffix("/")
            return Param(name if name and "/" not in name else ".".join(keys), UNKNOWN)
    if isinstance(node, str) and node.startswith(_PREFIXES):
        return Param(node.partition("://")[2], UNKNOWN)
    return node


def _filled(tree: Any, packed: Any) -> Any:
    """Return a tree of `_METADATA` with the values of its leaves in the msgpack file."""
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
