"""Classes of tree nodes: named in files, and found among the classes that the process has.

Nothing is ever imported by a name found in a file. A class is known if it was passed, or if its
module is imported and has it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
from msgspec import Struct

from ckpt._arguments import invalid
from ckpt._format.manifest import JsonValue

# Classes that were passed, by their name in files.
Classes = Mapping[str, type]


@dataclass(frozen=True, slots=True)
class UnknownNode:
    """Stands for a node whose class this process does not have, or cannot make; read-only.

    `node["count"]` is one of its fields. It is a PyTree node. Saving it again stores the same data,
    so that a process with the class gets the object back.

    Attributes:
        class_name: `module:qualified name` of the class that was saved.
        fields: Its children by field name.
        kind: Kind of the saved node: `namedtuple` or `custom`.
        static: Its static data, as in the manifest.
        unstored: Names of the static data that could not be stored.
    """

    class_name: str
    fields: Mapping[Any, Any]
    kind: str = field(default="custom", repr=False)
    static: JsonValue = field(default=None, repr=False)
    unstored: tuple[str, ...] = field(default=(), repr=False)

    def __getitem__(self, name: Any) -> Any:
        return self.fields[name]

    def __reduce__(self) -> Any:
        # Read-only mappings cannot be pickled.
        fields = dict(self.fields)
        return UnknownNode, (self.class_name, fields, self.kind, self.static, self.unstored)


def _flatten_unknown(node: UnknownNode) -> tuple[list[tuple[Any, Any]], Any]:
    children = [(jax.tree_util.DictKey(name), child) for name, child in node.fields.items()]
    aux = (node.class_name, tuple(node.fields), node.kind, _Static(node.static))
    return children, (*aux, node.unstored)


def _unflatten_unknown(aux: Any, children: Iterable[Any]) -> UnknownNode:
    name, fields, kind, static, unstored = aux
    found = MappingProxyType(dict(zip(fields, children, strict=True)))
    return UnknownNode(name, found, kind, static.value, unstored)


class _Static(Struct, frozen=True):
    """A JSON value that can be hashed, which a treedef needs."""

    value: JsonValue

    def __hash__(self) -> int:
        return hash(repr(self.value))


jax.tree_util.register_pytree_with_keys(UnknownNode, _flatten_unknown, _unflatten_unknown)


def class_name(kind: type) -> str:
    """Return the name of a class in files: `module:qualified name`."""
    return f"{kind.__module__}:{kind.__qualname__}"


def known_classes(classes: Mapping[str, type] | Iterable[type]) -> Classes:
    """Return classes by their name in files.

    Args:
        classes: The classes, or a mapping of names to them, for those that were renamed or moved
            since they were saved.

    Raises:
        InvalidArgumentError: Something other than a class is in `classes`.
    """
    if isinstance(classes, Mapping):
        found = dict(classes)
    else:
        listed: list[Any] = list(classes)
        found = {class_name(kind): kind for kind in listed if isinstance(kind, type)}
        if len(found) != len(listed):
            raise invalid("classes", listed, "different classes")
    for name, kind in found.items():
        given: object = kind
        if not isinstance(given, type) or name.count(":") != 1:
            what = "the 'module:name' of each saved class and the class that it is now"
            raise invalid("classes", {name: kind}, what)
    return MappingProxyType(found)


def find_class(name: str, classes: Classes) -> type | None:
    """Return the class called `name` in a file, or None if this process does not have it.

    Modules are looked up among the imported ones only, and through their dictionaries, so that no
    module-level `__getattr__` runs and nothing is imported.
    """
    if name in classes:
        return classes[name]
    module_name, _, qualified = name.partition(":")
    scope: Any = sys.modules.get(module_name)
    for part in qualified.split("."):
        if scope is None:
            return None
        try:
            # Goes past `__getattribute__`, in which a lazily loaded module would load itself.
            scope = object.__getattribute__(scope, "__dict__").get(part)
        except AttributeError:
            return None
    return scope if isinstance(scope, type) else None
