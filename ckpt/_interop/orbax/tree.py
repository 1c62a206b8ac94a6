"""`_METADATA`: the tree of an item, and the kinds of its leaves. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from ckpt._interop.orbax.node_classes import with_classes
from ckpt.errors import CorruptCheckpointError

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
