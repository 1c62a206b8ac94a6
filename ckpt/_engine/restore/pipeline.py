"""The restore flow: manifest in hand, load the items that are wanted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import anyio

from ckpt._engine.memory.arena import Arena
from ckpt._engine.memory.buffers import Buffers
from ckpt._engine.restore.item_reader import CONCURRENT_BATCHES, EngineItemReader
from ckpt._engine.restore.shared_reads import Broadcast
from ckpt._events import EventRecorder, Observer
from ckpt._format.manifest import Manifest
from ckpt._plan.adapt import Adapt
from ckpt._plan.multihost.per_process import pick
from ckpt.errors import InvalidArgumentError, located
from ckpt.handlers._base import errors_of
from ckpt.handlers._registry import Handlers
from ckpt.storage._base import Storage
from ckpt.storage._manifests import lies_in

__all__ = ["ItemTarget", "restore_items"]


@dataclass(frozen=True, slots=True)
class ItemTarget:
    """How one item is wanted.

    Attributes:
        like: The target, or None for the item as it was saved.
        adapt: What may differ between the two.
    """

    like: Any
    adapt: Adapt


async def restore_items(
    manifest: Manifest,
    storage: Storage,
    entry: str,
    wanted: Mapping[str, ItemTarget],
    handlers: Handlers,
    arena: Arena,
    buffers: Buffers,
    observers: tuple[Observer, ...],
    process: int = 0,
    processes: int = 1,
    broadcast: Broadcast | None = None,
) -> dict[str, Any]:
    """Return the wanted items of a committed step, loaded concurrently.

    In a job of several processes each one loads what is for itself; none waits for another, unless
    they share what they read. Then items are loaded one after the other, everywhere in one order.

    One that fails stops the others. What they set on objects by then (see `StatefulHandler`) stays.

    Args:
        manifest: The step's manifest.
        storage: Where the step lies.
        entry: Under which name.
        wanted: The wanted items by name.
        handlers: The handlers to choose from.
        arena: Staging memory of the engine.
        buffers: Makes the memory of restored arrays.
        observers: Take the timed phases.
        process: Number of this process in its job.
        processes: How many processes the job has.
        broadcast: How they share what they read; None where each reads what it needs.

    Raises:
        CheckpointError: What went wrong, with step and item.
    """
    unknown = sorted(set(wanted) - set(manifest.items))
    if unknown:
        raise InvalidArgumentError(
            f"there is no item {', '.join(unknown)}; the step has {', '.join(manifest.items)}",
            step=manifest.step,
        )
    recorder = EventRecorder("restore", manifest.step, observers)
    slots = anyio.Semaphore(CONCURRENT_BATCHES)
    place = lies_in(entry, manifest)
    found: dict[str, Any] = dict.fromkeys(wanted)

    async def load(name: str, want: ItemTarget) -> None:
        handler = handlers.named(manifest.items[name].handler, name)
        with errors_of(handler, name, "load it"):
            part = pick(manifest, name, process, processes)
            reader = EngineItemReader(
                storage,
                place,
                name,
                arena,
                buffers,
                recorder,
                manifest.files,
                slots,
                part,
                process,
                processes,
                broadcast,
            )
            found[name] = await handler.load(part.entry, want.like, want.adapt, reader)

    with located(step=manifest.step):
        if broadcast is not None:
            for name in sorted(wanted):
                await load(name, wanted[name])
            await broadcast.finish()
            return found
        async with anyio.create_task_group() as tasks:
            for name, want in wanted.items():
                tasks.start_soon(load, name, want)
    return found
