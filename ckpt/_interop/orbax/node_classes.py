"""`value_metadata_tree`: the nodes of a tree that were tuples and named tuples. Pure.

Orbax writes it with the option `support_rich_types`, beside the tree of dicts and lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ckpt._tree.classes import UnknownNode


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
