"""The JSON handler, for dicts and lists of JSON values, pydantic models and dataclasses."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Awaitable
from typing import Any

import jax

from ckpt._arguments import is_config, plain_config
from ckpt._format.manifest import ItemEntry, JsonValue
from ckpt._plan.adapt import Adapt
from ckpt._tree.registered_nodes import difference, lost_attribute
from ckpt.errors import CorruptCheckpointError, InvalidArgumentError, TargetMismatchError
from ckpt.handlers._base import Deferred, ItemReader, ItemWriter, entry_data


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


# Name under which both APIs of Orbax look for an item of JSON.
_FILE = "metadata"
_MAX_DEPTH = 100
_LEAST_INT, _GREATEST_INT = -(2**63), 2**64 - 1


class JsonHandler:
    """Saves JSON values exactly as they are, and pydantic models and dataclasses as their JSON.

    Models, dataclasses and configurations (of ml_collections and OmegaConf) need no choice of
    handler, unless jax knows the class as a tree. A configuration comes back as a dict, or as the
    class of a target, with lists for its tuples. A dict could also be a tree of arrays, so this
    handler has to be chosen for it: `handlers={"config": JsonHandler()}`.

    Example:
        ```python
        handlers = {"config": ckpt.handlers.JsonHandler()}
        with ckpt.sync.CheckpointManager(root, handlers=handlers) as mgr:
            mgr.save(step, items={"model": state, "config": {"lr": 0.1}})
        ```
    """

    name = "json"

    def accepts(self, item: Any) -> bool:
        """Return True if `item` is a model, dataclass or configuration that is a leaf to jax."""
        known = is_config(item) or _is_model(type(item))
        return known and jax.tree_util.all_leaves([item])

    async def stage(self, item: Any, writer: ItemWriter) -> Awaitable[ItemEntry]:
        """Take the JSON of `item`; see `Handler.stage`.

        Raises:
            InvalidArgumentError: The item has a value that JSON does not have, or that would come
                back as another value; the message names the place.
        """
        data: dict[str, JsonValue] = {"model": None}
        if _is_model(type(item)):
            data["model"] = f"{type(item).__module__}:{type(item).__qualname__}"
            encoded = await writer.in_thread(_model_bytes, item)
        else:
            plain = plain_config(item) if is_config(item) else item
            encoded = await writer.in_thread(json_bytes, plain)

        async def commit() -> ItemEntry:
            await writer.write_file(_FILE, encoded)
            return ItemEntry(handler=self.name, nbytes=len(encoded), data=data)

        return Deferred(commit)

    async def load(self, entry: ItemEntry, like: Any, adapt: Adapt, reader: ItemReader) -> Any:
        """Return the values, or the model or dataclass whose class (or object) `like` is.

        Raises:
            TargetMismatchError: The values do not fit the model, or `like` is something else.
            CorruptCheckpointError: The stored file is damaged.
        """
        entry_data(entry, self.name)
        encoded = await reader.read_file(_FILE)
        wanted = like if isinstance(like, type) else type(like)
        if like is not None and _is_model(wanted):
            return await reader.in_thread(_as_model, wanted, encoded)
        value = await reader.in_thread(json_value, encoded)
        if is_config(like) and isinstance(value, dict):
            return wanted(value)
        if like is not None and not (wanted in (dict, list) and isinstance(value, wanted)):
            raise TargetMismatchError(
                f"the item is a JSON {type(value).__name__}; like= can be a pydantic model, a "
                f"dataclass, or the class of one, or of the same type, and is {like!r:.80}"
            )
        return value


def json_bytes(value: Any) -> bytes:
    """Return the JSON of `value`, from which exactly the same value comes back.

    Raises:
        InvalidArgumentError: There is no such JSON; the message says where.
    """
    problem = _problem(value)
    if problem is not None:
        raise InvalidArgumentError(problem)
    return json.dumps(value, ensure_ascii=False).encode()


def json_value(data: bytes) -> Any:
    """Return the value of a JSON file.

    Raises:
        CorruptCheckpointError: The bytes are no JSON.
    """
    try:
        return json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"what is stored is no JSON: {error!s:.200}") from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _problem(value: Any) -> str | None:
    """Return why `value` has no JSON of its own, and where; None if it has."""
    found = _find(value, 0)
    if found is None:
        return None
    where, why = found
    return f"at {where.removeprefix('.') or 'the top':.300}: {why}"


def _find(value: Any, depth: int) -> tuple[str, str] | None:
    """Return the place of the first value below here that JSON does not have, and why, or None."""
    kind = type(value)
    if value is None or kind is bool:
        return None
    if kind is float:
        if math.isfinite(value):
            return None
        return "", f"{value}; JSON has no such number. Pass None or a str"
    if kind is int:
        if _LEAST_INT <= value <= _GREATEST_INT:
            return None
        return "", f"an int of {value.bit_length()} bits; JSON numbers end at 64. Pass a str"
    if kind is str:
        return None if _is_unicode(value) else ("", "a text with lone surrogates")
    if depth >= _MAX_DEPTH:
        return "", f"nested deeper than {_MAX_DEPTH} levels, or contains itself"
    if kind is list:
        for number, each in enumerate(value):
            found = _find(each, depth + 1)
            if found is not None:
                return f"[{number}]{found[0]}", found[1]
        return None
    if kind is dict:
        for key, each in value.items():
            if type(key) is not str or not _is_unicode(key):
                return "", f"the key {key!r:.60}; JSON keys are texts"
            found = _find(each, depth + 1)
            if found is not None:
                return f".{key:.60}{found[0]}", found[1]
        return None
    return "", (
        f"a {kind.__module__}.{kind.__qualname__} is not a JSON value; those are dict, list, str, "
        "int, float, bool and None"
    )


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _is_model(kind: type) -> bool:
    return is_model(kind) or dataclasses.is_dataclass(kind)


def _model_bytes(model: Any) -> bytes:
    name = f"the {'model' if is_model(type(model)) else 'dataclass'} {type(model).__name__}"
    try:
        # JSON turns NaN into null silently, so the values are checked first.
        problem = _problem(model_values(model))
        encoded = b"" if problem is not None else model_json(model)
        again = model if problem is not None else made_from_json(type(model), encoded)
        lost = difference(model, again)
    except Exception as error:
        # pydantic, or code of the class, may raise anything.
        raise InvalidArgumentError(
            f"{name} cannot be made again from its own JSON: {error!s:.500}{_hint_at_trees(model)}"
        ) from error
    if problem is not None:
        raise InvalidArgumentError(f"{name} {problem}")
    if lost is not None:
        where, undeclared = lost
        if undeclared is not None:
            raise lost_attribute(*undeclared, where or None)
        raise InvalidArgumentError(
            f"{name} comes back from its own JSON with another value in {where!r:.120}: an "
            "excluded or secret field, a subclass of the declared type, a tuple that JSON has no "
            "word for. Save its JSON values with JsonHandler (model.model_dump(mode='json'), "
            "dataclasses.asdict), if that is all there is to keep"
        )
    return encoded


def _hint_at_trees(model: Any) -> str:
    if is_model(type(model)):
        return ""
    return ". If it holds arrays, register its class with jax.tree_util.register_dataclass"


def _as_model(kind: Any, encoded: bytes) -> Any:
    try:
        return made_from_json(kind, encoded)
    except Exception as error:
        what = "model" if is_model(kind) else "dataclass"
        raise TargetMismatchError(
            f"what is stored does not fit the {what} {kind.__name__}: {error!s:.500}"
        ) from error
