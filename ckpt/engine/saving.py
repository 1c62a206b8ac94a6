"""What a save is given: the request, and the engine that lasts from save to save."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt.engine.arena import Arena
from ckpt.engine.buffers import Buffers
from ckpt.engine.plans import PlanCache
from ckpt.events import Observer
from ckpt.handlers.registry import Handlers
from ckpt.manifest import JsonValue
from ckpt.settings import Staging

__all__ = ["SaveEngine", "SaveRequest"]


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What to save and under which name.

    Attributes:
        entry: Name of the entry it becomes.
        step: The step, or None for a one-shot checkpoint.
        items: The objects by item name. Emptied when staging begins: the caller's arrays must not
            be kept alive while they are written.
        unnamed: Whether the caller gave one object without a name.
        metrics: User metrics.
        metadata: User metadata.
        overwrite: Whether an existing entry is replaced.
    """

    entry: str
    step: int | None
    items: dict[str, Any]
    unnamed: bool
    metrics: Mapping[str, Any] | None
    metadata: JsonValue
    overwrite: bool


@functools.cache
def _known_versions() -> tuple[tuple[str, str], ...]:
    """Return the versions of the libraries that shape the format; they cost milliseconds."""
    versions = {"python": platform.python_version()}
    for name in ("ckpt-jax", "jax", "numpy", "tensorstore"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return tuple(versions.items())


def _versions() -> dict[str, str]:
    return dict(_known_versions())


@dataclass(slots=True)
class SaveEngine:
    """What lasts from save to save.

    Attributes:
        staging: How arrays are staged.
        handlers: The handlers, and how one is chosen.
        observers: Take the timed phases.
        arena: The staging memory.
        buffers: Makes the memory of restored arrays.
        plans: Plans of earlier saves.
        now_ns: Tells the time, in Unix nanoseconds.
        versions: Versions of the libraries that write.
    """

    staging: Staging
    handlers: Handlers
    observers: tuple[Observer, ...]
    arena: Arena
    buffers: Buffers
    plans: PlanCache = field(default_factory=PlanCache)
    now_ns: Callable[[], int] = time.time_ns
    versions: dict[str, str] = field(default_factory=_versions)
