"""Leaf types: objects of users' classes as leaves of a tree, packed into what can be stored.

A leaf of such a type becomes a `PackedLeaf`: a tree node that holds the packed value under the name
of the type. So all code behind the handler sees an ordinary tree: arrays are staged, written and
checked as always, and Orbax finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ckpt._arguments import invalid, shown
from ckpt._tree.classes import class_name
from ckpt.errors import CheckpointError, HandlerError, UnsupportedLeafError, located

PyTree = Any
# Classes of leaves that are stored as they are.
_OWN = (bool, int, float, complex, str, bytes, np.ndarray, np.generic, jax.Array, type(None))
_CONTAINERS = (dict, list, tuple)
_MOST_NAME = 200


@dataclass(frozen=True, slots=True)
class LeafType:
    """The storage of objects of a class where they are leaves of a tree.

    Attributes:
        cls: The class. Leaves of its subclasses are of this type, too, unless they have their own.
        pack: Returns the stored value of an object: an array, a number, a text, bytes, or a tree of
            them. `save` calls it before it returns, so it should be quick. A restore calls it for
            the objects in the target, whose arrays may be `jax.ShapeDtypeStruct`.
        unpack: Returns the object again, given the restored result of `pack`. A value that a
            restore skips stays `...`, and is not unpacked.
        name: Name of the type in checkpoints; by default that of the class with its module. Keep it
            when the class is renamed or moved.

    Raises:
        InvalidArgumentError: An attribute is invalid, or objects of the class are stored already.

    Example:
        ```python
        from decimal import Decimal

        money = ckpt.handlers.LeafType(Decimal, pack=str, unpack=Decimal, name="decimal")
        trees = ckpt.handlers.PyTreeHandler(leaf_types=[money])
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
        if issubclass(given, (*_OWN, *_CONTAINERS)) or given is object:
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
    """Stands for a leaf whose `LeafType` this process does not have; a PyTree node.

    Saving it again stores the same data, so that a process with the type gets the object.

    Attributes:
        type_name: Name of its `LeafType`.
        value: The packed value.

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
# Checkpoints name the class, so it has the module that users see.
PackedLeaf.__module__ = "ckpt.handlers"
PACKED = class_name(PackedLeaf)


class LeafTypes:
    """The leaf types of a handler."""

    def __init__(self, types: Iterable[LeafType]) -> None:
        """Make the leaf types of a handler from a list of them.

        Raises:
            InvalidArgumentError: Something else is in the list, or two types have one name or
                class.
        """
        given: object = types
        if isinstance(given, str | bytes) or not isinstance(given, Iterable):
            raise invalid("leaf_types", given, "a list of objects of ckpt.handlers.LeafType")
        listed: list[Any] = list(given)
        for each in listed:
            if not isinstance(each, LeafType):
                raise invalid("leaf_types", each, "objects of ckpt.handlers.LeafType")
        self._by_name: Mapping[str, LeafType] = {each.name: each for each in listed}
        self._by_class: Mapping[type, LeafType] = {each.cls: each for each in listed}
        if not len(listed) == len(self._by_name) == len(self._by_class):
            raise invalid("leaf_types", listed, "types with different names and classes")
        # Type of the leaves of each class that was looked up.
        self._found: dict[type, LeafType | None] = {}

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def packed(self, tree: PyTree) -> PyTree:
        """Return the tree with every leaf of these types packed.

        The tree has been walked before: jax would recurse without end into one that contains
        itself.

        Raises:
            UnsupportedLeafError: A leaf cannot be packed; the message names its path.
        """
        try:
            return jax.tree_util.tree_map_with_path(self._pack, tree, is_leaf=self.is_one)
        except CheckpointError:
            raise
        except (ValueError, TypeError):
            # jax cannot walk the tree. Flattening it later says why, and names the place.
            return tree

    def unpacked(self, tree: PyTree, unknown: set[str]) -> PyTree:
        """Return the tree with its packed leaves unpacked.

        Args:
            tree: The tree.
            unknown: Receives the names of unknown types; their leaves stay packed.

        Raises:
            HandlerError: A leaf cannot be unpacked; the message names its path.
        """

        def unpack(path: Any, leaf: Any) -> Any:
            if not isinstance(leaf, PackedLeaf):
                return leaf
            known = self._by_name.get(leaf.type_name)
            if known is None:
                unknown.add(leaf.type_name)
                return leaf
            skipped = [each is ... for each in jax.tree.leaves(leaf.value)]
            if any(skipped):
                return ... if all(skipped) else leaf
            with located(leaf=_path(path)):
                try:
                    return known.unpack(leaf.value)
                except CheckpointError:
                    raise
                except Exception as error:
                    # This is no damage: the stored value may be whole.
                    raise HandlerError(
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
        inside = jax.tree.leaves(value, is_leaf=self.is_one)
        if any(self.is_one(each) for each in inside):
            raise UnsupportedLeafError(
                f"pack of {known.name!r} returned {shown(value)}, in which there are leaves of "
                "such types: expected arrays, numbers, texts, bytes, or a tree of them",
                leaf=_path(path),
            )
        return PackedLeaf(known.name, value)

    def is_one(self, node: Any) -> bool:
        """Return True if an object is of one of these types."""
        return bool(self._by_class) and self._type_of(node) is not None

    def _type_of(self, leaf: Any) -> LeafType | None:
        kind = type(leaf)
        if kind not in self._found:
            self._found[kind] = self._look_up(leaf)
        return self._found[kind]

    def _look_up(self, leaf: Any) -> LeafType | None:
        if isinstance(leaf, (*_OWN, *_CONTAINERS)):
            return None
        nearest = (self._by_class[each] for each in type(leaf).__mro__ if each in self._by_class)
        # A class may also be abstract, with subclasses that are only registered.
        others = (each for cls, each in self._by_class.items() if isinstance(leaf, cls))
        return next(nearest, None) or next(others, None)


def _path(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
