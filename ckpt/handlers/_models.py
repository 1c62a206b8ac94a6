"""Models: pydantic models and dataclasses as JSON, and back. The seam to pydantic for objects."""

from __future__ import annotations

from typing import Any


def is_model(kind: type) -> bool:
    """Return True if a class is a pydantic model, or has the methods that are used of one."""
    needed = ("model_dump", "model_dump_json", "model_validate_json")
    return all(callable(getattr(kind, name, None)) for name in needed)


def model_values(item: Any) -> Any:
    if is_model(type(item)):
        return item.model_dump(mode="json", round_trip=True, by_alias=True)
    return _adapter(type(item)).dump_python(item, mode="json", round_trip=True)


def model_json(item: Any) -> bytes:
    if is_model(type(item)):
        return str(item.model_dump_json(round_trip=True, by_alias=True)).encode()
    found: bytes = _adapter(type(item)).dump_json(item, round_trip=True)
    return found


def made_from_json(kind: Any, encoded: bytes) -> Any:
    """Return a model or a dataclass of this class from its JSON.

    Raises:
        Exception: It does not fit. pydantic, or code of the class, may raise anything.
    """
    if is_model(kind):
        return kind.model_validate_json(encoded)
    return _adapter(kind).validate_json(encoded)


def _adapter(kind: Any) -> Any:
    # Imported late: it takes a third of the time of all imports, and few steps hold such objects.
    import pydantic

    return pydantic.TypeAdapter(kind)
