"""Models: pydantic models and dataclasses as JSON, and back. The seam to pydantic for objects."""

from __future__ import annotations

from typing import Any


def is_model(kind: type) -> bool:
    """Tell whether a class is a model of pydantic, or has the methods that are used of one."""
    needed = ("model_dump", "model_dump_json", "model_validate_json")
    return all(callable(getattr(kind, name, None)) for name in needed)


def model_values(item: Any) -> Any:
    """Return the JSON values of a model or a dataclass."""
    if is_model(type(item)):
        return item.model_dump(mode="json", round_trip=True, by_alias=True)
    return _adapter(type(item)).dump_python(item, mode="json", round_trip=True)


def model_json(item: Any) -> bytes:
    """Return the JSON of a model or a dataclass."""
    if is_model(type(item)):
        return str(item.model_dump_json(round_trip=True, by_alias=True)).encode()
    found: bytes = _adapter(type(item)).dump_json(item, round_trip=True)
    return found


def made_from_json(kind: Any, encoded: bytes) -> Any:
    """Return a model or a dataclass of this class from its JSON.

    Raises:
        Exception: It does not fit; whatever pydantic, or code of the class, raises.
    """
    if is_model(kind):
        return kind.model_validate_json(encoded)
    return _adapter(kind).validate_json(encoded)


def _adapter(kind: Any) -> Any:
    # Its import takes a third of the time of all others, and few steps hold such objects.
    import pydantic

    return pydantic.TypeAdapter(kind)
