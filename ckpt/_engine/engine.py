"""The engine: state that all saves and restores of a manager share: memory, plans, handlers."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import platform
import time
from collections.abc import Callable, Iterable

from msgspec import Struct, field

from ckpt._engine.base_step import BaseStep
from ckpt._engine.memory.arena import Arena
from ckpt._engine.memory.buffers import Buffers
from ckpt._engine.plan_cache import PlanCache
from ckpt._engine.signs.kernels import Kernels
from ckpt._events import Observer
from ckpt._settings import SignsPlace, Staging
from ckpt._tree.patterns import Pattern
from ckpt.handlers._registry import Handlers

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
        vital_signs: Place where saves take the vital signs of arrays; None if nowhere.
        now_ns: Clock, in Unix nanoseconds.
        versions: Versions of the libraries that write.
        frozen: Patterns of leaves that are checked for changes before they are copied from devices.
        kernels: Kernels that take vital signs on devices.
        base_step: The last step that was saved, or until then the last that was restored; the next
            save can share its files.
        damaged: Data files of the root that are known to be damaged, by path relative to their
            step. Their names are random, so a file of that name is the same file in every step.
        writes_later: True if nothing is written while a caller waits: writes to memory would take
            cores from the copies that it waits for.
        odd_leaves: Names of the leaves in which the last save found values that are not finite.
    """

    staging: Staging
    handlers: Handlers
    observers: tuple[Observer, ...]
    arena: Arena
    buffers: Buffers
    plans: PlanCache = field(default_factory=PlanCache)
    vital_signs: SignsPlace | None = None
    now_ns: Callable[[], int] = time.time_ns
    versions: dict[str, str] = field(default_factory=lambda: dict(_known_versions()))
    frozen: tuple[Pattern, ...] = ()
    kernels: Kernels = field(default_factory=Kernels)
    base_step: BaseStep | None = None
    damaged: set[str] = field(default_factory=set)
    odd_leaves: frozenset[str] = frozenset()
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
