"""The engine: what all saves and restores of a manager share, such as memory, plans, handlers."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import platform
import time
from collections.abc import Callable, Iterable

from msgspec import Struct, field

from ckpt._engine.last_save import LastSave
from ckpt._engine.memory.arena import Arena
from ckpt._engine.memory.buffers import Buffers
from ckpt._engine.plan_cache import PlanCache
from ckpt._engine.signs.kernels import Kernels
from ckpt._events import Observer
from ckpt._settings import Staging, VitalSignsMode
from ckpt._tree.patterns import Pattern
from ckpt.handlers._registry import Handlers

logger = logging.getLogger("ckpt")

# Files that a warning names.
_NAMED = 3


@functools.cache
def _known_versions() -> tuple[tuple[str, str], ...]:
    """Return the versions of the libraries that shape the format; looking them up takes long."""
    versions = {"python": platform.python_version()}
    for name in ("ckpt-jax", "jax", "numpy", "tensorstore"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return tuple(versions.items())


def _versions() -> dict[str, str]:
    return dict(_known_versions())


class Engine(Struct):
    """What all saves and restores of a manager share.

    Attributes:
        staging: How arrays are staged.
        handlers: The handlers.
        observers: They get the timed phases.
        arena: The staging memory.
        buffers: Makes the memory of restored arrays.
        plans: Plans of earlier saves.
        vital_signs: Where saves take the vital signs of arrays.
        now_ns: Returns the time, in Unix nanoseconds.
        versions: Versions of the libraries that write.
        frozen: Patterns of leaves that are looked at before they are copied from their devices.
        kernels: What takes vital signs on devices.
        last_save: The last step that was saved, or before that the last that was restored: the next
            one can share its files.
        damaged: Data files of the root that are known to be damaged, by path relative to their
            step. Their names are random: one of that name is the same file, in whichever step.
        writes_later: Whether nothing is written while a caller waits: writes to memory would take
            the cores from the copies that it waits for.
        odd_leaves: The leaves with values that are not finite that the last save has found.
    """

    staging: Staging
    handlers: Handlers
    observers: tuple[Observer, ...]
    arena: Arena
    buffers: Buffers
    plans: PlanCache = field(default_factory=PlanCache)
    vital_signs: VitalSignsMode = False
    now_ns: Callable[[], int] = time.time_ns
    versions: dict[str, str] = field(default_factory=_versions)
    frozen: tuple[Pattern, ...] = ()
    kernels: Kernels = field(default_factory=Kernels)
    last_save: LastSave | None = None
    damaged: set[str] = field(default_factory=set)
    odd_leaves: frozenset[str] = frozenset()
    writes_later: bool = False

    def distrust(self, files: Iterable[str], why: str) -> None:
        """Have no save take over these files any more; warn once where the next one would have.

        Args:
            files: As of `damaged`.
            why: Which step has them, and what is wrong with it.
        """
        new = set(files) - self.damaged
        self.damaged |= new
        known = {} if self.last_save is None else self.last_save.items
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
