"""Registered nodes: how nodes of classes registered with `jax.tree_util` are stored and made again.

Beside its children such a node has static data: the fields of a dataclass that are not children, or
the auxiliary data that its class gives to jax. Plain values of it are stored (see `static_values`).
A node is made by the flatten and unflatten functions that its class registered. The result must
flatten into the same children under the same keys; otherwise it becomes an `UnknownNode`.

Attributes that objects hold beside their stored parts, so that nothing is lost silently. jax and
JSON know the declared fields of a class and the contents of a container. Python lets an object hold
more: whatever its constructor sets, slots, extra and private fields of pydantic models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import types
import weakref
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

import jax
from msgspec import Struct

from ckpt._format.manifest import JsonValue, Node
from ckpt._tree.leaf_names import join_keys
from ckpt._tree.static_values import (
    Classes,
    ClassNotHereError,
    UnknownNode,
    class_name,
    decode_value,
    encode_key,
    encode_value,
    find_class,
)
from ckpt.errors import CorruptCheckpointError, UnsupportedLeafError

# Class attribute that names the attributes to leave out.
OMITTED = "__ckpt_omit__"
# Notes of Python and pydantic about an object, which are not part of it.
_NOTES = frozenset({"__orig_class__", "__pydantic_fields_set__"})
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_MISSING = object()


def held(item: Any, taken: Collection[str] = ()) -> dict[str, Any]:
    """Return the attributes of an object other than `taken`, by name.

    Values of `cached_property`, weak references, and names that the class leaves out do not count.
    """
    kind = type(item)
    found: dict[str, Any] = {}
    for name, slot in _slots(kind):  # type: ignore[arg-type]
        with contextlib.suppress(AttributeError):
            found[name] = slot.__get__(item)
    found |= getattr(item, "__dict__", {})
    for name in ("__pydantic_extra__", "__pydantic_private__"):
        found |= found.pop(name, None) or {}
    return {
        name: value
        for name, value in found.items()
        if name not in taken and not _is_spared(kind, name, value)
    }


# Cached: thousands of nodes are of a few classes.
@functools.lru_cache(maxsize=1024)
def _slots(kind: type) -> tuple[tuple[str, Any], ...]:
    members = [each for base in reversed(kind.__mro__) for each in vars(base).items()]
    return tuple(each for each in members if isinstance(each[1], types.MemberDescriptorType))


def _is_spared(kind: type, name: str, value: Any) -> bool:
    # `type` is asked, since a proxy passes `isinstance` on to an object that may be gone.
    if issubclass(type(value), (weakref.ReferenceType, *weakref.ProxyTypes)) or name in _NOTES:
        return True
    return isinstance(inspect.getattr_static(kind, name, None), functools.cached_property) or any(
        name == each if isinstance(each, str) else name in each
        for each in (vars(base).get(OMITTED, ()) for base in kind.__mro__)
    )


def lost_attribute(kind: type, name: str, leaf: str | None = None) -> UnsupportedLeafError:
    """Return the error for an attribute that a restore would not bring back."""
    return UnsupportedLeafError(
        f"an object of {kind.__module__}.{kind.__qualname__} holds the attribute {name!r}, which "
        "would be lost: it is no declared field, and only those and the contents of containers are "
        "stored. Make it a field, or put it elsewhere in what is saved; to leave it out, say "
        f"{OMITTED} = ({name!r},) in the class",
        leaf=leaf,
    )


# Path to a part; and its class and name, if it is an attribute that is no field.
Difference = tuple[str, tuple[type, str] | None]


def difference(one: Any, other: Any, exact: bool = True) -> Difference | None:
    """Return the first part of an object that another one lacks, or None.

    Args:
        one: The object.
        other: The object that was made from its stored parts.
        exact: True if a plain value must be of the same type, as the value of a field must.
    """
    kind, parts = type(one), _contents_of(one)
    is_other_kind = kind is not type(other) and (exact or parts is not None)
    if is_other_kind or (isinstance(one, _CONTAINERS) and len(one) != len(other)):
        return "", None
    if parts is None:
        return None if _are_equal(one, other) else ("", None)
    others = _contents_of(other) or {}
    declared = (*getattr(kind, "model_fields", ()), *getattr(kind, "__dataclass_fields__", ()))
    for (is_attribute, key), part in parts.items():
        found = difference(part, others.get((is_attribute, key), _MISSING), is_attribute)
        if found is not None:
            if is_attribute and key not in declared:
                return "", (kind, key)
            return f"{key}.{found[0]}".rstrip("."), found[1]
    return None


def _contents_of(item: Any) -> dict[tuple[bool, Any], Any] | None:
    """Return the parts of an object by key and by attribute, or None for a plain value."""
    contents: Iterable[tuple[Any, Any]] = ()
    if isinstance(item, dict):
        contents = item.items()
    elif isinstance(item, _CONTAINERS):
        contents = zip(item, item, strict=True) if isinstance(item, Set) else enumerate(item)
    elif not (hasattr(type(item), "model_dump") or dataclasses.is_dataclass(type(item))):
        return None
    parts = {(False, key): part for key, part in contents}
    return parts | {(True, name): part for name, part in held(item).items()}


def _are_equal(one: Any, other: Any) -> bool:
    # The comparison runs code of the class, and of arrays it has no single result.
    with contextlib.suppress(Exception):
        return one is other or bool(one == other)
    return False


# Static data is a few numbers and names; anything larger does not belong into a manifest.
_MAX_STATIC = 64 << 10
_AUX = "aux"
_NOT_HERE = "not imported here: import it, or pass it as PyTreeHandler(classes=[...])"


class RegisteredNode(Struct, frozen=True):
    """A node of a registered class, opened; its keys and children are in jax's order."""

    name: str
    keys: list[Hashable]
    children: list[Any]
    static: JsonValue
    unstored: list[str]


class UnknownReason(Struct, frozen=True):
    """The reason why nodes of a class became `UnknownNode`s."""

    name: str
    reason: str


def open_registered(tree: Any) -> RegisteredNode | None:
    """Return the stored parts of a node whose class is registered with jax, or None for a leaf."""
    treedef: Any
    entries, treedef = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: node is not tree
    )
    if len(entries) == 1 and not entries[0][0]:
        return None
    keys = _keys_of([path for path, _ in entries])
    children = [child for _, child in entries]
    kind = type(tree)
    static: JsonValue
    found = _static_fields(tree, keys, treedef) if _is_dataclass_node(kind, keys) else None
    if found is not None:
        static, unstored = {"fields": found[0]}, found[1]
    else:
        node = treedef.node_data()
        static, unstored = None, [_AUX]
        with contextlib.suppress(ValueError):
            static, unstored = {_AUX: encode_value(None if node is None else node[1])}, []
    if static is not None and len(json.dumps(static)) > _MAX_STATIC:
        static, unstored = None, [_AUX]
    return RegisteredNode(class_name(kind), keys, children, static, unstored)


def is_plain_namedtuple(tree: Any) -> bool:
    """Return True if jax sees a namedtuple as its fields; its class may be registered otherwise."""
    fields = getattr(tree, "_fields", None)
    if fields is None:
        return False
    entries, treedef = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: node is not tree
    )
    node: Any = treedef.node_data()  # type: ignore[attr-defined]
    return (
        [getattr(path[0], "name", None) for path, _ in entries] == list(fields)
        and all(child is own for (_, child), own in zip(entries, tree, strict=True))
        and (node is None or node[1] is None)
    )


def refuse_undeclared(tree: Any, node: Node, path: Sequence[str]) -> None:
    """Refuse an opened node that holds attributes which jax does not know.

    A class with flatten functions of its own chooses what it leaves out.

    Raises:
        UnsupportedLeafError: The node holds such attributes; the message names class and attribute.
    """
    fields = getattr(type(tree), "__dataclass_fields__", None)
    again: Mapping[str, Any] = {}
    if node.kind != "custom" and isinstance(tree, dict | tuple):
        # A shortcut: thousands of nodes have no place for attributes.
        extra = held(tree) if getattr(tree, "__dict__", None) else {}
    elif fields is None or not (extra := held(tree, fields)):
        return
    else:
        leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda part: part is not tree)
        if _has_own_functions(treedef):
            return
        # Attributes that the constructor sets again are not lost. It may raise anything.
        with contextlib.suppress(Exception):
            again = held(jax.tree.unflatten(treedef, leaves))
    for name, value in extra.items():
        if name not in again or difference(value, again[name]) is not None:
            raise lost_attribute(type(tree), name, join_keys(path))


def build_registered(node: Node, keys: Sequence[Any], children: list[Any], classes: Classes) -> Any:
    """Return the node, or an `UnknownReason` that says why it cannot be made."""
    name = node.class_name or "?"
    if name == class_name(UnknownNode):
        # Written by versions that did not keep the class and kind of an unknown node.
        return UnknownNode(name, MappingProxyType(dict(zip(keys, children, strict=True))))
    kind = find_class(name, classes)
    if kind is None:
        return UnknownReason(name, _NOT_HERE)
    if node.unstored or not isinstance(node.static, dict):
        what = ", ".join(node.unstored) or _AUX
        return UnknownReason(name, f"its {what} could not be stored: pass like=")
    try:
        if _AUX in node.static:
            made = _from_aux(kind, decode_value(node.static[_AUX], classes), children)
        else:
            made = _from_fields(kind, node.static["fields"], keys, children, classes)
        again, _ = jax.tree_util.tree_flatten_with_path(made, is_leaf=lambda part: part is not made)
    except ClassNotHereError as error:
        return UnknownReason(name, error.message)
    except CorruptCheckpointError:
        raise
    except Exception as error:
        # Raised by code of the class, which a hostile file may have chosen.
        return UnknownReason(
            name, f"it cannot be made from what is stored ({error!s:.120}): pass like="
        )
    same = len(again) == len(children) and all(
        mine is child for (_, mine), child in zip(again, children, strict=True)
    )
    if type(made) is not kind or not same or not _agree(keys, [path for path, _ in again]):
        return UnknownReason(name, "it has other fields today: pass like=")
    return made


def build_namedtuple(node: Node, children: list[Any], classes: Classes) -> Any:
    """Return the namedtuple, or an `UnknownReason` that says why it cannot be made."""
    name = node.class_name or "?"
    kind = find_class(name, classes)
    if kind is None or not (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        return UnknownReason(name, _NOT_HERE)
    if list(kind._fields) != node.keys:
        return UnknownReason(name, "it has other fields today: pass like=")
    # Not called: the class's own constructor may take other arguments.
    return tuple.__new__(kind, children)


def _keys_of(paths: Sequence[Any]) -> list[Hashable]:
    """Return a key for every child: the ones its class gives if they can be stored, or numbers."""
    keys = [_key_of(path[0]) for path in paths]
    try:
        for key in keys:
            if type(key) is not str:
                encode_key(key)
        if len(set(keys)) == len(keys):
            return keys
    except (TypeError, ValueError):
        # A key that cannot be hashed or stored.
        pass
    return list(range(len(keys)))


def _key_of(entry: Any) -> Hashable:
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            key: Hashable = getattr(entry, attribute)
            return key
    return str(entry)


def _agree(keys: Sequence[Any], paths: Sequence[Any]) -> bool:
    """Return True if children stored under `keys` are those at `paths` today.

    A class that only counts its children, then or now, says nothing about their order.
    """
    numbers = list(range(len(keys)))
    today = _keys_of(paths)
    return list(keys) == today or numbers in (list(keys), today)


def _is_dataclass_node(kind: type, keys: Sequence[Any]) -> bool:
    return dataclasses.is_dataclass(kind) and kind.__dataclass_fields__.keys() >= set(keys)


def _static_fields(
    tree: Any, keys: Sequence[Any], treedef: Any
) -> tuple[dict[str, JsonValue], list[str]] | None:
    """Return the fields of a dataclass that are not children, and those that cannot be stored.

    None if its own flatten function gives jax something other than its fields.
    """
    kind = type(tree)
    values = {}
    for name in kind.__dataclass_fields__:
        with contextlib.suppress(AttributeError):
            values[name] = object.__getattribute__(tree, name)
    if not _flattens_into(kind, values, treedef):
        return None
    fields, unstored = {}, []
    for name in sorted(values.keys() - set(keys)):
        try:
            fields[name] = encode_value(values[name])
        except ValueError:
            # jax drops some fields, such as caches; so does the checkpoint.
            if not _flattens_into(kind, {**values, name: object()}, treedef):
                unstored.append(name)
    return fields, unstored


def _flattens_into(kind: type, values: Mapping[str, Any], treedef: Any) -> bool:
    try:
        return bool(_flattened(kind, values) == treedef)
    except Exception:
        # Code of the class may raise anything, and some values cannot be compared.
        return False


def _flattened(kind: type, values: Mapping[str, Any]) -> Any:
    """Return the treedef, one level deep, of an object that was not initialised but has fields."""
    bare: Any = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(bare, name, value)
    return jax.tree_util.tree_structure(bare, is_leaf=lambda part: part is not bare)


def _from_aux(kind: type, aux: Any, children: list[Any]) -> Any:
    leaf = jax.tree_util.tree_structure(0)
    treedef = _treedef(kind, aux, [leaf] * len(children))
    if not _has_own_functions(treedef):
        # jax itself would make it, and trusts its data: wrong data from a file ends the process.
        raise TypeError("its class has no flatten functions of its own")
    return treedef.unflatten(children)


def _treedef(kind: type, aux: Any, children: list[Any]) -> Any:
    return jax.tree_util.PyTreeDef.from_node_data_and_children(
        jax.tree_util.default_registry, (kind, aux), children
    )


def _has_own_functions(treedef: Any) -> bool:
    """Return True if a class flattens itself; jax flattens dataclasses, namedtuples and others."""
    # The last node is the root, and its first part says which sort of node it is.
    of_functions: Any = jax.tree.structure(UnknownNode("", {}))
    return bool(treedef.__getstate__()[1][-1][0] == of_functions.__getstate__()[1][-1][0])


def _from_fields(
    kind: type, static: Any, keys: Sequence[Any], children: list[Any], classes: Classes
) -> Any:
    """Make a dataclass: a bare object flattens into a treedef, which makes the real one."""
    known: dict[str, Any] = kind.__dataclass_fields__  # type: ignore[attr-defined]
    values = dict(zip(keys, children, strict=True))
    values |= {name: decode_value(value, classes) for name, value in static.items()}
    unknown = sorted(values.keys() - known.keys())
    if unknown:
        raise ValueError(f"it has no field {unknown[0]!r:.40} today")
    for name, field in known.items():
        if field.default is not dataclasses.MISSING:
            values.setdefault(name, field.default)
        elif field.default_factory is not dataclasses.MISSING and name not in values:
            values[name] = field.default_factory()
    return _flattened(kind, values).unflatten(children)
