"""`_METADATA`: the tree of an item, and the kinds of its leaves. Pure.

`value_metadata_tree`: the nodes of a tree that were tuples and named tuples. Pure. Orbax writes it
with the option `support_rich_types`, beside the tree of dicts and lists.

`checkpoint`: the tree of an item in one msgpack file, as T5X and old versions wrote it. Pure. The
file has the whole tree. Each leaf is a value, or a text that names the array for the leaf. Versions
that also write `_METADATA` keep in this file only leaves that were to be aggregated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ckpt._interop.flax import PackedArray, parse_msgpack
from ckpt._tree.static_values import UnknownNode
from ckpt.errors import CorruptCheckpointError


def with_classes(tree: Any, classes: Any) -> Any:
    """Return a tree with its original tuples and named tuples.

    A named tuple is restored as one if its class is imported. Entries that do not fit the tree are
    ignored: they say nothing about leaves.

    Args:
        tree: The tree of dicts and lists.
        classes: The description of its nodes by Orbax.
    """
    if isinstance(classes, list):
        return _as_sequence(tree, classes)
    if not isinstance(classes, dict):
        return tree
    entries = classes.get("entries")
    if classes.get("category") == "custom" and classes.get("clazz") == "tuple":
        found = _as_sequence(tree, entries)
        return tuple(found) if isinstance(found, list) and isinstance(entries, list) else found
    if classes.get("category") == "namedtuple" and isinstance(entries, list):
        return _as_namedtuple(tree, classes, entries)
    if not isinstance(tree, dict):
        return tree
    return {key: with_classes(child, classes.get(key)) for key, child in tree.items()}


def _as_sequence(tree: Any, entries: Any) -> Any:
    if not isinstance(tree, list) or not isinstance(entries, list) or len(tree) != len(entries):
        return tree
    return [with_classes(child, entry) for child, entry in zip(tree, entries, strict=True)]


def _as_namedtuple(tree: Any, classes: Mapping[str, Any], entries: Sequence[Any]) -> Any:
    fields = {
        str(entry.get("key")): entry.get("value") for entry in entries if isinstance(entry, dict)
    }
    if not isinstance(tree, dict) or set(tree) != set(fields):
        return tree
    children = {name: with_classes(tree[name], value) for name, value in fields.items()}
    name = f"{classes.get('module')}:{classes.get('clazz')}"
    return UnknownNode(name, MappingProxyType(children), kind="namedtuple")


TREE_FILE = "_METADATA"
# Kind of a leaf of which only the array is known.
UNKNOWN = "unknown"
# Kinds of leaves whose value is an array.
ARRAY_KINDS = frozenset({"jax.Array", "np.ndarray", "scalar", UNKNOWN})
_SEQUENCE = 1
# Constructors of empty nodes; the class of a namedtuple is not recorded.
_EMPTY: Mapping[str, Callable[[], Any]] = {
    "Dict": dict,
    "List": list,
    "Tuple": tuple,
    "NamedTuple": tuple,
    "None": lambda: None,
}


class Param(Struct, frozen=True):
    """A placeholder for a leaf in a tree of Orbax.

    Attributes:
        name: Its name in Orbax: its keys, joined with dots.
        kind: Its kind in Orbax: `jax.Array`, `np.ndarray`, `scalar`, `string` and others.
        is_packed: True if its value is in the msgpack file.
    """

    name: str
    kind: str
    is_packed: bool = False


class OrbaxTree(Struct, frozen=True):
    """The contents of `_METADATA`.

    Attributes:
        tree: The tree, with a `Param` for every stored leaf.
        is_v3: True if arrays are zarr v3.
        has_all_chunks: True if chunks are stored even if all elements are the fill value.
        is_packed: True if the msgpack file has values of leaves.
    """

    tree: Any
    is_v3: bool
    has_all_chunks: bool
    is_packed: bool = False


class _Key(Struct):
    key: str
    key_type: int = 2


class _Value(Struct):
    value_type: str = UNKNOWN
    skip_deserialize: bool = False


class _TreeLeaf(Struct):
    key_metadata: list[_Key] = []
    value_metadata: _Value = msgspec.field(default_factory=_Value)


class _TreeFile(Struct):
    tree_metadata: dict[str, _TreeLeaf]
    use_zarr3: bool = False
    value_metadata_tree: str | None = None
    store_array_data_equal_to_fill_value: bool = False


def parse_tree(data: bytes, path: str = TREE_FILE) -> OrbaxTree:
    """Return the tree that a file `_METADATA` at `path` describes.

    Tuples come back as lists if Orbax did not record them; a target has its own.

    Raises:
        CorruptCheckpointError: The file is damaged.
    """
    try:
        found = msgspec.json.decode(data, type=_TreeFile)
        leaves = [(leaf.key_metadata, _value(leaf)) for leaf in found.tree_metadata.values()]
        tree = _built(leaves)
        if found.value_metadata_tree is not None:
            tree = with_classes(tree, msgspec.json.decode(found.value_metadata_tree))
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path} is damaged: {error!s:.200}") from error
    is_packed = any(isinstance(leaf, Param) and leaf.is_packed for _, leaf in leaves)
    has_all_chunks = found.store_array_data_equal_to_fill_value
    return OrbaxTree(tree, found.use_zarr3, has_all_chunks, is_packed)


def _value(leaf: _TreeLeaf) -> Any:
    about = leaf.value_metadata
    if about.skip_deserialize and about.value_type in _EMPTY:
        return _EMPTY[about.value_type]()
    name = ".".join(each.key for each in leaf.key_metadata)
    return Param(name, about.value_type, is_packed=about.skip_deserialize)


class _OpenNode(dict[str, Any]):
    """A node whose children are being collected."""

    is_sequence = False


def _built(leaves: Sequence[tuple[Sequence[_Key], Any]]) -> Any:
    # In the dict above it, the whole tree has the key "".
    top = _OpenNode()
    for keys, value in leaves:
        parent, name = top, ""
        for key in keys:
            node = parent.setdefault(name, _OpenNode())
            if not isinstance(node, _OpenNode):
                raise ValueError(f"{name!r:.60} is a leaf, and has leaves")
            node.is_sequence = node.is_sequence or key.key_type == _SEQUENCE
            parent, name = node, key.key
        if name in parent:
            raise ValueError(f"{name!r:.60} is there twice")
        parent[name] = value
    return _finished(top.get("", {}))


def _finished(node: Any) -> Any:
    if not isinstance(node, _OpenNode):
        return node
    children = {key: _finished(child) for key, child in node.items()}
    if not node.is_sequence:
        return children
    numbered = {int(key): child for key, child in children.items()}
    if sorted(numbered) != list(range(len(children))):
        raise ValueError(f"a list has the places {sorted(numbered)[:8]}")
    return [numbered[place] for place in range(len(numbered))]


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
