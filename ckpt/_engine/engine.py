"""The engine: state that all saves and restores of a manager share: memory, plans, handlers."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import platform
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from ckpt._engine.base_step import BaseStep
from ckpt._engine.memory.arena import Arena
from ckpt._engine.memory.buffers import Buffers
from ckpt._engine.plan_cache import PlanCache
from ckpt._events import Observer
from ckpt._settings import Staging
from ckpt.handlers._registry import Handlers

if TYPE_CHECKING:
    from ckpt._engine.chunk_extensions import ChunkExtension

logger = logging.getLogger("ckpt")

# Most files that a warning names.
_NAMED = 3


@functools.cache
def _known_versions() -> tuple[tuple[str, str], ...]:
    """Return the versions of the libraries that shape the format; the lookup is slow."""
    versions = {"python": platform.python_version()}
    for name in ("ckpt-jax", "jax", "numpy", "tensorstore"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return tuple(versions.items())


class Engine(Struct):
    """State that all saves and restores of a manager share.

    Attributes:
        staging: Settings of the staging of arrays.
        handlers: The handlers of items.
        observers: Receivers of the timed phases.
        arena: The staging memory.
        buffers: Source of the memory of restored arrays.
        plans: Plans of earlier saves.
        extensions: What notes something about the chunks of arrays.
        extension_states: Objects that extensions keep from call to call, by name of the extension.
        now_ns: Clock, in Unix nanoseconds.
        versions: Versions of the libraries that write.
        base_step: The last step that was saved, or until then the last that was restored; the next
            save can share its files.
        damaged: Data files of the root that are known to be damaged, by path relative to their
            step. Their names are random, so a file of that name is the same file in every step.
        writes_later: True if nothing is written while a caller waits: writes to memory would take
            cores from the copies that it waits for.
    """

    staging: Staging
    handlers: Handlers
    observers: tuple[Observer, ...]
    arena: Arena
    buffers: Buffers
    plans: PlanCache = field(default_factory=PlanCache)
    extensions: tuple[ChunkExtension, ...] = ()
    extension_states: dict[str, Any] = field(default_factory=dict)
    now_ns: Callable[[], int] = time.time_ns
    versions: dict[str, str] = field(default_factory=lambda: dict(_known_versions()))
    base_step: BaseStep | None = None
    damaged: set[str] = field(default_factory=set)
    writes_later: bool = False

    def distrust(self, files: Iterable[str], why: str) -> None:
        """Keep saves from reusing these files; warn once if the next save would have shared one.

        Args:
            files: Paths as in `damaged`.
            why: Text that names the step that has the files, and its fault.
        """
        new = set(files) - self.damaged
        self.damaged |= new
        known = {} if self.base_step is None else self.base_step.items
        shared = sorted(new & {f"{name}/{path}" for name, it in known.items() for path in it.files})
        if shared:
            more = f" and {len(shared) - _NAMED} more" if len(shared) > _NAMED else ""
            logger.warning(
                "%s. The next save would have shared %s%s, and writes anew what is in there. Steps "
                "that have such a file already may be damaged, too: verify them",
                why,
                ", ".join(shared[:_NAMED]),
                more,
            )
