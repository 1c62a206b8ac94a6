"""Static values and classes of nodes: both as JSON, and back exactly.

Classes of tree nodes: named in files, and found among the classes that the process has. Nothing is
ever imported by a name found in a file. A class is known if it was passed, or if its module is
imported and has it.

Static values: dict keys and the static data of classes, as JSON and back exactly. Strings and small
integers are stored as themselves, everything else as `{"kind": ...}`. The kinds are a closed list,
so decoding a file makes only plain values and members of enumerations that this process already
has.
"""

from __future__ import annotations

import base64
import enum
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from msgspec import Struct

from ckpt._arguments import invalid
from ckpt._format.array_format import DTYPES
from ckpt._format.manifest import JsonValue
from ckpt.errors import CorruptCheckpointError

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


_MAX_DEPTH = 16
# Keys that earlier versions wrote may be nested deeper.
_MAX_STORED_DEPTH = 150
_MAX_INT = 2**63


class ClassNotHereError(CorruptCheckpointError):
    """A stored value is a member of an enumeration that this process does not have."""


def encode_value(value: Any, depth: int = 0) -> JsonValue:
    """Return the JSON form of a plain value; the inverse of `decode_value`.

    Raises:
        ValueError: `value` has no JSON form; the message says why.
    """
    if depth > _MAX_DEPTH:
        raise ValueError(f"nested deeper than {_MAX_DEPTH} levels")
    kind = type(value)
    if value is None:
        return None
    if kind is int:
        # Python limits the length of decimal texts, so a large integer is hexadecimal.
        return cast("JsonValue", value) if abs(value) < _MAX_INT else {"int": hex(value)}
    if kind is str:
        return _encode_text(value)
    if kind in _SIMPLE:
        return {kind.__name__: _SIMPLE[kind][0](value)}
    if kind in (tuple, list):
        return {kind.__name__: [encode_value(each, depth + 1) for each in value]}
    if kind in (set, frozenset):
        # Sorted, so that the order does not change from one run to the next.
        parts = sorted((encode_value(each, depth + 1) for each in value), key=repr)
        return {kind.__name__: parts}
    if kind is dict:
        return {
            "dict": [
                [encode_value(k, depth + 1), encode_value(v, depth + 1)] for k, v in value.items()
            ]
        }
    return _encode_other(value, depth)


def _encode_text(text: str) -> JsonValue:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError("it has lone surrogates; use bytes") from error
    return text


def _encode_other(value: Any, depth: int) -> JsonValue:
    if isinstance(value, np.generic) and value.dtype.name in DTYPES:
        return {"numpy": [value.dtype.name, base64.b64encode(value.tobytes()).decode()]}
    if isinstance(value, np.dtype) and DTYPES.get(value.name) == value:
        return {"dtype": value.name}
    name = _SCALAR_TYPE_NAMES.get(id(value))
    if name is not None:
        return {"scalar_type": name}
    if isinstance(value, PartitionSpec) and not _is_special(value):
        return {"partition_spec": [encode_value(each, depth + 1) for each in value]}
    if isinstance(value, enum.Enum):
        # A combination of flags is not a member.
        if type(value).__members__.get(value.name) is not value:
            raise ValueError(f"{value!r:.60} is not a single member of its enumeration")
        return {"enum": [class_name(type(value)), value.name]}
    raise ValueError(f"a value of type {type(value).__name__} cannot be stored")


def _is_special(spec: PartitionSpec) -> bool:
    return bool(getattr(spec, "unreduced", None) or getattr(spec, "reduced", None))


def decode_value(value: JsonValue, classes: Classes, depth: int = 0) -> Any:
    """Return the value stored as `value`.

    Args:
        value: Result of `encode_value`.
        classes: Classes of enumerations, which are looked up here first.
        depth: Number of values that it is nested in.

    Raises:
        CorruptCheckpointError: Its kind is unknown; a `ClassNotHereError` if it is a member of an
            enumeration that this process does not have.
    """
    if value is None or type(value) in (str, int):
        return value
    if depth > _MAX_STORED_DEPTH:
        raise CorruptCheckpointError("a stored value is nested too deeply")
    if isinstance(value, dict) and len(value) == 1:
        ((kind, content),) = value.items()
        try:
            return _decode(kind, content, classes, depth + 1)
        except CorruptCheckpointError:
            raise
        except Exception as error:
            # Python, numpy and jax raise many errors for malformed contents.
            raise CorruptCheckpointError(
                f"a stored {kind:.40} is malformed: {value!r:.80}"
            ) from error
    raise CorruptCheckpointError(f"a stored value is of no known kind: {value!r:.80}")


def _decode(kind: str, content: Any, classes: Classes, depth: int) -> Any:
    if kind in _DECODERS:
        return _DECODERS[kind](content)
    if not isinstance(content, list):
        raise TypeError("not a list")
    if kind in _COLLECTIONS:
        return _COLLECTIONS[kind]([decode_value(each, classes, depth) for each in content])
    if kind == "dict":
        return {
            decode_value(key, classes, depth): decode_value(each, classes, depth)
            for key, each in content
        }
    if kind == "numpy":
        dtype, data = content
        (scalar,) = np.frombuffer(
            base64.b64decode(_checked_text(data), validate=True), DTYPES[dtype]
        )
        return scalar
    if kind == "enum":
        name, member = map(_checked_text, content)
        return _member(name, member, classes)
    raise ValueError("no known kind")


def _member(name: str, member: str, classes: Classes) -> enum.Enum:
    found = find_class(name, classes)
    if isinstance(found, enum.EnumMeta) and member in found.__members__:
        return cast("enum.Enum", found.__members__[member])
    what = f"the member {member:.60} of the enumeration {name:.120}"
    hint = "import it, or pass it as PyTreeHandler(classes=[...])"
    raise ClassNotHereError(f"{what} is stored, which this process does not have: {hint}")


def encode_key(key: Any) -> JsonValue:
    """Return the JSON form of a dict key.

    Raises:
        ValueError: `key` has no JSON form; the message says why.
    """
    if _has_set(key):
        # The text of a set, which would be part of leaf paths, differs in every process.
        raise ValueError("sets have no order")
    return encode_value(key)


def _has_set(key: Any) -> bool:
    if type(key) is tuple:
        return any(map(_has_set, key))
    return isinstance(key, set | frozenset)


def decode_key(key: JsonValue, classes: Classes | None = None) -> Any:
    """Return the dict key stored as `key`.

    Raises:
        CorruptCheckpointError: Its kind is unknown.
    """
    if type(key) is str or type(key) is int:
        return key
    found = decode_value(key, classes or {})
    try:
        hash(found)
    except TypeError as error:
        raise CorruptCheckpointError(
            f"a stored dict key is of no known kind: {key!r:.80}"
        ) from error
    return found


def _checked_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("not a truth value")
    return value


def _encode_bytes(value: bytes) -> str:
    return base64.b64encode(value).decode()


_SIMPLE: dict[type, tuple[Callable[[Any], JsonValue], Callable[[Any], Any]]] = {
    bool: (bool, _flag),
    float: (repr, lambda text: float(_checked_text(text))),
    complex: (repr, lambda text: complex(_checked_text(text))),
    bytes: (_encode_bytes, lambda text: base64.b64decode(_checked_text(text), validate=True)),
    type(...): (lambda _: "...", lambda _: ...),
}
# Classes that stand for a dtype, as in fields such as `param_dtype`.
_SCALAR_TYPES = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module, names in (
        (np, [name for name in DTYPES if hasattr(np, name)]),
        (jnp, [name for name in DTYPES if hasattr(jnp, name)]),
    )
    for name in names
}
_SCALAR_TYPE_NAMES = {id(kind): name for name, kind in _SCALAR_TYPES.items()}
_DECODERS: dict[str, Callable[[Any], Any]] = {
    **{kind.__name__: decode for kind, (_, decode) in _SIMPLE.items()},
    "int": lambda text: int(_checked_text(text), 16),
    "dtype": lambda name: DTYPES[name],
    "scalar_type": lambda name: _SCALAR_TYPES[name],
}
_COLLECTIONS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "list": list,
    "set": set,
    "frozenset": frozenset,
    "partition_spec": lambda parts: PartitionSpec(*parts),  # type: ignore[no-untyped-call]
}
