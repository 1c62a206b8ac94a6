"""Attributes that objects hold beside their stored parts, so that nothing is lost silently.

jax and JSON know the declared fields of a class and the contents of a container. Python lets an
object hold more: whatever its constructor sets, slots, extra and private fields of pydantic models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Set
from typing import Any

from ckpt.errors import UnsupportedLeafError

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
