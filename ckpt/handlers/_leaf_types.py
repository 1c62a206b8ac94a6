"""Leaf types: objects of users' classes as leaves of a tree, packed into what can be stored.

A leaf of such a type becomes a `PackedLeaf`: a tree node that holds what the object was packed
into, under the name of its type. So everything behind the handler sees an ordinary tree: arrays are
staged, written and checked as always, and Orbax finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ckpt._arguments import invalid, shown
from ckpt._tree.classes import class_name
from ckpt.errors import CheckpointError, CorruptCheckpointError, UnsupportedLeafError, located

PyTree = Any
# What is stored as it is.
_OWN = (bool, int, float, complex, str, bytes, np.ndarray, np.generic, jax.Array, type(None))
_CONTAINERS = (dict, list, tuple)
_MOST_NAME = 200


@dataclass(frozen=True, slots=True)
class LeafType:
    """How objects of a class are stored where they are leaves of a tree.

    Attributes:
        cls: The class; leaves of its subclasses are of this type, too, unless they have their own.
        pack: Returns what is stored of an object: an array, a number, a text, bytes, or a tree of
            them. It is called by `save`, before that returns, so it should be quick.
        unpack: Returns the object again; it is given what `pack` returned, as it was restored.
        name: The name of the type in checkpoints; by default that of the class with its module.
            Keep it when the class is renamed or moved.

    Raises:
        InvalidArgumentError: An attribute is invalid, or the class is one that is stored already.

    Example:
        ```python
        from decimal import Decimal

        money = ckpt.handlers.LeafType(Decimal, pack=str, unpack=Decimal, name="decimal")
        trees = ckpt.PyTreeHandler(leaf_types=[money])
        mgr = ckpt.CheckpointManager(root, handlers=[trees])
        ```
    """

    cls: type
    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]
    name: str = ""

    def __post_init__(self) -> None:
        cls, name, pack, unpack = self.cls, self.name, self.pack, self.unpack
        given: object = cls
        if not isinstance(given, type):
            raise invalid("cls", cls, "a class", of="LeafType")
        if issubclass(given, (*_OWN, *_CONTAINERS)) or issubclass(object, given):
            what = "a class of your own; arrays, numbers, texts and containers are stored already"
            raise invalid("cls", cls, what, of="LeafType")
        for label, function in (("pack", pack), ("unpack", unpack)):
            if not callable(function):
                raise invalid(label, function, "a function of one argument", of="LeafType")
        text: object = name
        fits = isinstance(text, str) and text.isprintable() and len(text) <= _MOST_NAME
        if not fits:
            raise invalid("name", name, f"up to {_MOST_NAME} printable characters", of="LeafType")
        object.__setattr__(self, "name", name or class_name(cls))


@dataclass(frozen=True, slots=True)
class PackedLeaf:
    """Stands for a leaf of a type that this process was not told of; a PyTree node.

    Saving it again stores what was stored, so that a process which has the type gets the object.

    Attributes:
        type_name: Name of its `LeafType`.
        value: What it was packed into.

    Example:
        ```python
        assert ckpt.handlers.PackedLeaf("decimal", "1.10").value == "1.10"
        ```
    """

    type_name: str
    value: Any


def _flatten(leaf: PackedLeaf) -> tuple[list[tuple[Any, Any]], str]:
    return [(jax.tree_util.GetAttrKey("value"), leaf.value)], leaf.type_name


def _unflatten(type_name: str, children: Iterable[Any]) -> PackedLeaf:
    [value] = children
    return PackedLeaf(type_name, value)


jax.tree_util.register_pytree_with_keys(PackedLeaf, _flatten, _unflatten)
# It is named in checkpoints, so it is called as users see it.
PackedLeaf.__module__ = "ckpt.handlers"
PACKED = class_name(PackedLeaf)


class LeafTypes:
    """The leaf types of a handler."""

    def __init__(self, types: Iterable[LeafType]) -> None:
        """Know these.

        Raises:
            InvalidArgumentError: Something else is among them, or two have one name or class.
        """
        listed: list[Any] = list(types)
        for each in listed:
            if not isinstance(each, LeafType):
                raise invalid("leaf_types", each, "objects of ckpt.handlers.LeafType")
        self._by_name: Mapping[str, LeafType] = {each.name: each for each in listed}
        self._by_class: Mapping[type, LeafType] = {each.cls: each for each in listed}
        if not len(listed) == len(self._by_name) == len(self._by_class):
            raise invalid("leaf_types", listed, "types with different names and classes")

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def packed(self, tree: PyTree) -> PyTree:
        """Return the tree with every leaf of these types packed.

        Raises:
            UnsupportedLeafError: A leaf cannot be packed; names its path.
        """
        if not self:
            return tree
        return jax.tree_util.tree_map_with_path(self._pack, tree, is_leaf=self._is_one)

    def unpacked(self, tree: PyTree, unknown: set[str]) -> PyTree:
        """Return the tree with every packed leaf unpacked.

        Args:
            tree: The tree.
            unknown: Takes the names of the types that are not known; such leaves stay packed.

        Raises:
            CorruptCheckpointError: A leaf cannot be unpacked; names its path.
        """

        def unpack(path: Any, leaf: Any) -> Any:
            if not isinstance(leaf, PackedLeaf):
                return leaf
            known = self._by_name.get(leaf.type_name)
            if known is None:
                unknown.add(leaf.type_name)
                return leaf
            with located(leaf=_path(path)):
                try:
                    return known.unpack(leaf.value)
                except CheckpointError:
                    raise
                except Exception as error:
                    raise CorruptCheckpointError(
                        f"it cannot be unpacked as {known.name!r}: {type(error).__name__}: "
                        f"{error!s:.300}"
                    ) from error

        return jax.tree_util.tree_map_with_path(
            unpack, tree, is_leaf=lambda node: isinstance(node, PackedLeaf)
        )

    def _pack(self, path: Any, leaf: Any) -> Any:
        known = self._type_of(leaf)
        if known is None:
            return leaf
        try:
            value = known.pack(leaf)
        except Exception as error:
            raise UnsupportedLeafError(
                f"it cannot be packed as {known.name!r}: {type(error).__name__}: {error!s:.300}",
                leaf=_path(path),
            ) from error
        if value is leaf or self._is_one(value):
            raise UnsupportedLeafError(
                f"pack of {known.name!r} returned {shown(value)}: expected arrays, numbers, texts, "
                "bytes, or a tree of them",
                leaf=_path(path),
            )
        return PackedLeaf(known.name, value)

    def _is_one(self, node: Any) -> bool:
        return self._type_of(node) is not None

    def _type_of(self, leaf: Any) -> LeafType | None:
        kinds = type(leaf).__mro__
        return next((self._by_class[kind] for kind in kinds if kind in self._by_class), None)


def _path(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
