"""The PyTree handler, for trees of arrays, PRNG keys and Python scalars, or a single array.

Leaf types: objects of users' classes as leaves of a tree, packed into what can be stored. A leaf of
such a type becomes a `PackedLeaf`: a tree node that holds the packed value under the name of the
type. So all code behind the handler sees an ordinary tree: arrays are staged, written and checked
as always, and Orbax finds them.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ckpt._arguments import invalid, shown
from ckpt._format.manifest import ItemEntry
from ckpt._tree.boxes import unboxed_names
from ckpt._tree.leaf_names import nested
from ckpt._tree.leaf_specs import is_function
from ckpt._tree.static_values import class_name, known_classes
from ckpt._tree.structure import describe
from ckpt.errors import CheckpointError, HandlerError, UnsupportedLeafError, located
from ckpt.handlers._base import Deferred, ItemReader, ItemWriter

if TYPE_CHECKING:
    from ckpt._plan.adapt import Adapt, SourceArrays
    from ckpt._plan.match import Match

logger = logging.getLogger("ckpt")
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


class PyTreeHandler:
    """Saves every leaf of a tree, and the tree itself.

    Example:
        ```python
        handlers = [ckpt.handlers.PyTreeHandler(classes=[TrainState])]
        tree = await ckpt.load("runs/a/100", handlers=handlers)
        ```
    """

    name = "pytree"

    def __init__(
        self,
        classes: Mapping[str, type] | Iterable[type] = (),
        leaf_types: Iterable[LeafType] = (),
    ) -> None:
        """Rebuild also nodes of these classes, and save leaves of these types.

        A class is found by its name if its module is imported, so only others are needed here:
        classes made inside functions, and those renamed or moved since they were saved.

        Args:
            classes: The classes; or `{"module:name as saved": class}`.
            leaf_types: The types of leaves that are objects of your own classes.

        Raises:
            InvalidArgumentError: Something else is among the classes or the leaf types.
        """
        self._classes = known_classes(classes)
        self._leaf_types = LeafTypes(leaf_types)
        # Classes that were not found, with the reasons; each is logged once.
        self._said: set[tuple[str, str]] = set()

    def packs(self, item: Any) -> bool:
        """Return True if `item` itself is of one of the leaf types."""
        return self._leaf_types.is_one(item)

    def accepts(self, item: Any) -> bool:
        """Return True if `item` can be saved as a tree; leaves are checked one by one later."""
        # Only the name of a function is stored, so a function makes no item.
        return not is_function(item)

    async def stage(self, item: Any, writer: ItemWriter) -> Awaitable[ItemEntry]:
        """Take a snapshot of the tree; see `Handler.stage`.

        Raises:
            UnsupportedLeafError: A leaf or key cannot be stored; the message names its path.
        """
        await writer.stage(await self._packed(item, True, writer))

        async def commit() -> ItemEntry:
            return ItemEntry(handler=self.name)

        return Deferred(commit)

    async def load(self, entry: ItemEntry, like: Any, adapt: Adapt, reader: ItemReader) -> Any:
        """Return the tree, onto the target `like` where there is one; see `Handler.load`.

        Raises:
            TargetMismatchError: The target does not fit; the message lists every leaf.
            CorruptCheckpointError: The stored tree is damaged.
        """
        from ckpt._plan.adapt import adapted
        from ckpt._plan.leaf_entries import check_leaves
        from ckpt._plan.match import match_as_saved, match_target

        await reader.in_thread(check_leaves, entry)
        stored = await reader.in_thread(adapted, entry, adapt)
        if like is None:
            match = await reader.in_thread(match_as_saved, entry, stored, adapt)
            leaves = match.leaves(await reader.read(entry, match.reads))
            tree = await reader.in_thread(self._rebuilt, entry, stored, leaves)
            if any(node.class_name == PACKED for node in entry.nodes):
                tree = await reader.in_thread(self._unpacked, tree)
        else:
            like = await self._packed(like, False, reader)
            structure = await reader.in_thread(describe, like)
            match = await reader.in_thread(match_target, structure, stored, adapt)
            leaves = match.leaves(await reader.read(entry, match.reads))
            tree = jax.tree.unflatten(jax.tree.structure(like), leaves)
            if self._leaf_types:
                tree = await reader.in_thread(self._unpacked, tree)
        _report(entry, match, adapt, reader.item)
        return tree

    async def _packed(self, tree: Any, saved: bool, engine: ItemWriter | ItemReader) -> Any:
        if not self._leaf_types:
            return tree
        # Checked before packing, which makes the nodes anew, without attributes that jax ignores.
        await engine.in_thread(describe, tree, saved, self._leaf_types.is_one)
        return self._leaf_types.packed(tree)

    def _unpacked(self, tree: Any) -> Any:
        unknown: set[str] = set()
        tree = self._leaf_types.unpacked(tree, unknown)
        new = sorted((name, "") for name in unknown if (name, "") not in self._said)
        if new:
            self._said.update(new)
            logger.warning(
                "leaves of the types %s are restored as ckpt.handlers.PackedLeaf: pass their "
                "LeafType as PyTreeHandler(leaf_types=[...])",
                ", ".join(name for name, _ in new),
            )
        return tree

    def _rebuilt(self, entry: ItemEntry, stored: SourceArrays, leaves: list[Any]) -> Any:
        from ckpt._tree.structure import unflatten

        if stored.moved:
            return nested(dict(zip(stored.sources, leaves, strict=True)))
        tree, unknown = unflatten(entry.nodes, leaves, self._classes)
        new = sorted(set(unknown.items()) - self._said)
        if new:
            self._said.update(new)
            logger.warning(
                "restored as read-only ckpt.types.UnknownNode: %s",
                "; ".join(f"{name} ({why})" for name, why in new),
            )
        return tree


def _report(entry: ItemEntry, match: Match, adapt: Adapt, item: str) -> None:
    if match.moved:
        logger.warning(
            "%d arrays are not placed as they were: %s. Pass like= with shardings to place them",
            len(match.moved),
            "; ".join(
                f"{count} ({path}{', ...' if count > 1 else ''}): {lost}"
                for lost, (count, path) in _by_value(match.moved).items()
            ),
        )
    if adapt.report is not None:
        from ckpt._plan.adapt import RestoreReport

        used = set(match.used)
        names = unboxed_names(entry.nodes, entry.leaves.names)
        adapt.report(
            RestoreReport(
                item=item,
                used=tuple(name for name in names if name in used),
                unused=tuple(name for name in names if name not in used),
                kept=tuple(match.kept),
            )
        )


def _by_value(texts: Mapping[str, str]) -> dict[str, tuple[int, str]]:
    """Return, by text, the number of paths that have it and the first of them."""
    found: dict[str, tuple[int, str]] = {}
    for path, text in texts.items():
        count, first = found.get(text, (0, path))
        found[text] = count + 1, first
    return found
