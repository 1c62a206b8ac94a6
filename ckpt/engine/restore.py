"""The restore flow: manifest in hand, load the items that are wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt.engine.arena import Arena
from ckpt.engine.buffers import Buffers
from ckpt.engine.reader import EngineItemReader
from ckpt.errors import InvalidArgumentError, located
from ckpt.events import Observer, Recorder
from ckpt.handlers.base import Handler, handler_named
from ckpt.manifest import Manifest
from ckpt.storage.base import Storage

__all__ = ["restore_items"]


async def restore_items(
    manifest: Manifest,
    storage: Storage,
    entry: str,
    likes: Mapping[str, Any],
    handlers: Sequence[Handler],
    arena: Arena,
    buffers: Buffers,
    observers: tuple[Observer, ...],
) -> dict[str, Any]:
    """Return the wanted items of a committed step.

    Args:
        manifest: The step's manifest.
        storage: Where the step lies.
        entry: Under which name.
        likes: The wanted items by name, each with its target or None.
        handlers: The handlers to choose from.
        arena: Staging memory of the engine.
        buffers: Makes the memory of restored arrays.
        observers: Take the timed phases.

    Raises:
        CheckpointError: What went wrong, with step and item.
    """
    unknown = sorted(set(likes) - set(manifest.items))
    if unknown:
        raise InvalidArgumentError(
            f"there is no item {', '.join(unknown)}; the step has {', '.join(manifest.items)}",
            step=manifest.step,
        )
    recorder = Recorder("restore", manifest.step, observers)
    found = {}
    for name, like in likes.items():
        item = manifest.items[name]
        with located(step=manifest.step, item=name):
            handler = handler_named(item.handler, handlers, name)
            reader = EngineItemReader(storage, entry, name, arena, buffers, recorder)
            found[name] = await handler.load(item, like, reader)
    return found
