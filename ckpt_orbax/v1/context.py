"""`Context`: settings for all calls within a block."""

from __future__ import annotations

import contextvars
import copy
import dataclasses
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Self

from ckpt_orbax.options import AsyncOptions as AsyncOptions
from ckpt_orbax.options import FileOptions as FileOptions
from ckpt_orbax.options import MultiprocessingOptions as MultiprocessingOptions
from ckpt_orbax.v1.handlers import CheckpointableHandlerRegistry, local_registry

_LOG: logging.Logger = logging.getLogger("ckpt")
# Settings that have been said to have no effect.
_SAID: set[str] = set()


class Settings:
    """Settings of which only some have an effect here; another one is accepted, and said once."""

    def __init__(self, name: str, **known: Any) -> None:
        """Hold the known settings, by name."""
        vars(self).update(known, _name=name, _known=frozenset(known))

    def __setattr__(self, name: str, value: Any) -> None:
        where = f"{self._name}.{name}"
        if name not in self._known and where not in _SAID:
            _SAID.add(where)
            _LOG.warning("the setting %s of a Context has no effect", where)
        vars(self)[name] = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> Settings:
        found = Settings.__new__(Settings)
        vars(found).update({key: copy.copy(value) for key, value in vars(self).items()})
        return found


def _saving() -> Settings:
    storage = Settings("array.saving.storage_options", dtype=None)
    return Settings("array.saving", storage_options=storage)


@dataclasses.dataclass
class ArrayOptions:
    """Options of arrays: a dtype in `saving.storage_options`, and padding in `loading`."""

    saving: Any = dataclasses.field(default_factory=_saving)
    loading: Any = dataclasses.field(
        default_factory=lambda: Settings("array.loading", enable_padding_and_truncation=False)
    )


@dataclasses.dataclass
class PyTreeOptions:
    """Options of trees: `loading.partial_load`."""

    saving: Any = dataclasses.field(default_factory=lambda: Settings("pytree.saving"))
    loading: Any = dataclasses.field(
        default_factory=lambda: Settings("pytree.loading", partial_load=False)
    )


@dataclasses.dataclass
class CheckpointablesOptions:
    """Options of several items: the `registry` of handlers."""

    registry: CheckpointableHandlerRegistry = dataclasses.field(default_factory=local_registry)


@dataclasses.dataclass
class DeletionOptions:
    """Options of deletions: `gcs_deletion_options.todelete_full_path`."""

    gcs_deletion_options: Any = dataclasses.field(
        default_factory=lambda: Settings("deletion.gcs_deletion_options", todelete_full_path=None)
    )


_GROUPS: dict[str, Callable[[], Any]] = {
    "array": ArrayOptions,
    "asynchronous": AsyncOptions,
    "checkpointables": CheckpointablesOptions,
    "deletion": DeletionOptions,
    "file": FileOptions,
    "multiprocessing": MultiprocessingOptions,
    "pytree": PyTreeOptions,
    **{
        each: partial(Settings, each) for each in ("atomicity", "memory", "pathways", "safetensors")
    },
}


class Context:
    """Settings for all calls within a block. Those that have no effect are accepted, and said once.

    Attributes:
        checkpoint_layout: Without effect: layouts are recognised.

    Example:
        ```python
        context = v1.Context()
        context.pytree.loading.partial_load = True
        with context:
            params = v1.load(path, {"params": abstract_state["params"]})
        ```
    """

    array: Any
    asynchronous: Any
    checkpointables: Any
    deletion: Any
    file: Any
    multiprocessing: Any
    pytree: Any

    def __init__(self, context: Context | None = None, **options: Any) -> None:
        """Begin with the settings of another context.

        Args:
            context: The other one; None for that of the block around, or the defaults.
            options: Groups of settings, such as `pytree=` or `pytree_options=`.
        """
        base = context if context is not None else _current.get()
        given = {name.removesuffix("_options"): value for name, value in options.items()}
        given["asynchronous"] = given.pop("async", given.get("asynchronous"))
        self.checkpoint_layout: Any = given.pop("checkpoint_layout", None)
        for name, make in _GROUPS.items():
            value = given.pop(name, None)
            if value is None:
                value = make() if base is None else copy.deepcopy(getattr(base, name))
            setattr(self, name, value)
            setattr(self, f"{name.replace('asynchronous', 'async')}_options", value)
        if given:
            raise TypeError(f"Context() has no settings {', '.join(given)}")
        self._tokens: list[Any] = []

    def __enter__(self) -> Self:
        self._tokens.append(_current.set(self))
        return self

    def __exit__(self, *_: object) -> None:
        _current.reset(self._tokens.pop())


_current: contextvars.ContextVar[Context | None] = contextvars.ContextVar("context", default=None)


def current(context: Context | None = None) -> Context:
    """Return the context of the block around, or another one, or the defaults."""
    return _current.get() or context or Context()
