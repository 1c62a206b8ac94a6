"""The save flow: plan, stage, write, merge, record, publish. Reads top to bottom."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio

from ckpt.commit import CommitHooks
from ckpt.engine.arena import Arena
from ckpt.engine.tensors import write_context
from ckpt.engine.writer import LANES, EngineItemWriter, PlanCache, SaveSession
from ckpt.errors import located
from ckpt.events import Observer, Recorder
from ckpt.handlers.base import Handler, handler_for
from ckpt.layout.orbax_view import item_view, step_view
from ckpt.manifest import (
    FILE_NAME,
    FORMAT_VERSION,
    FileEntry,
    ItemEntry,
    JsonValue,
    Manifest,
    digest,
    encode,
)
from ckpt.settings import Staging
from ckpt.storage.base import Storage

__all__ = ["SaveEngine", "SaveRequest", "save_step"]


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What to save and under which name.

    Attributes:
        entry: Name of the entry it becomes.
        step: The step, or None for a one-shot checkpoint.
        items: The objects by item name. Emptied once they are staged: the caller's arrays must
            not be kept alive while they are written.
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


@dataclass(slots=True)
class SaveEngine:
    """What lasts from save to save: the arena and the plans."""

    staging: Staging
    handlers: Sequence[Handler]
    observers: tuple[Observer, ...]
    arena: Arena
    plans: PlanCache = field(default_factory=PlanCache)


async def save_step(
    engine: SaveEngine,
    storage: Storage,
    request: SaveRequest,
    hooks: CommitHooks,
    on_staged: Callable[[], None],
) -> Manifest:
    """Save one step and publish it; on any failure or cancellation leave nothing behind.

    Args:
        engine: The engine.
        storage: Where to.
        request: What.
        hooks: The commit to move along.
        on_staged: Called once the caller may change or donate everything it passed.

    Returns:
        The manifest of the published step.

    Raises:
        CheckpointError: What went wrong; further failures are among its notes.

    Cancellation: input and output under way is waited for, the attempt is removed, and nothing of
    it is visible, unless publishing had begun: then the step is whole.
    """
    created_ns = time.time_ns()
    recorder = Recorder("save", request.step, engine.observers)
    try:
        with located(step=request.step):
            async with anyio.create_task_group() as tasks:
                session = SaveSession(
                    storage,
                    engine.staging,
                    engine.arena,
                    write_context(LANES),
                    hooks,
                    recorder,
                    engine.plans,
                    tasks,
                )
                tasks.start_soon(_begin, session, request)
                manifest = await _run(session, engine, request, on_staged, created_ns)
        return manifest
    finally:
        # The task group has ended, and with it every use of the staged memory.
        session.free_all()
        if session.attempt is not None:
            with anyio.CancelScope(shield=True):
                await storage.discard(session.attempt)


async def _begin(session: SaveSession, request: SaveRequest) -> None:
    """Open the attempt while the tree is planned."""
    await session.storage.prepare()
    session.attempt = await session.storage.begin(request.entry)
    session.attempt_ready.set()


async def _run(
    session: SaveSession,
    engine: SaveEngine,
    request: SaveRequest,
    on_staged: Callable[[], None],
    created_ns: int,
) -> Manifest:
    hooks = session.hooks
    hooks.stage("staging")
    pending = {}
    for name, item in request.items.items():
        with located(item=name):
            handler = handler_for(item, engine.handlers, name)
            pending[name] = await handler.stage(item, EngineItemWriter(session, name))
    del item
    request.items.clear()
    hooks.stage("writing")
    on_staged()
    entries = {name: await commit for name, commit in pending.items()}
    # Past this point a cancelled save may still be published; before it, never.
    await anyio.lowlevel.checkpoint()
    hooks.stage("publishing")
    return await _publish(session, request, entries, created_ns)


async def _publish(
    session: SaveSession,
    request: SaveRequest,
    entries: Mapping[str, ItemEntry],
    created_ns: int,
) -> Manifest:
    """Write the small files, the manifest last, and publish the attempt."""
    attempt = await session.opened()
    storage = session.storage
    committed_ns = time.time_ns()
    with session.recorder.phase("publish"):
        files = step_view(
            request.entry, entries, request.metrics, request.metadata, created_ns, committed_ns
        )
        for name, entry in entries.items():
            view = await anyio.to_thread.run_sync(item_view, entry)
            files.update({f"{name}/{path}": data for path, data in view.items()})
        # Each is made durable by itself; together they share the journal's commits.
        async with anyio.create_task_group() as writers:
            for path, data in files.items():
                writers.start_soon(storage.write, attempt, path, data)
        for path, data in files.items():
            session.files[path] = FileEntry(size=len(data), digest=digest(data))
        manifest = Manifest(
            format="ckpt",
            version=FORMAT_VERSION,
            step=request.step,
            attempt=attempt.id,
            unnamed=request.unnamed,
            items=dict(entries),
            metrics=None if request.metrics is None else dict(request.metrics),
            metadata=request.metadata,
            created_ns=created_ns,
            committed_ns=committed_ns,
            writer=_versions(),
            process_count=1,
            files=session.files,
        )
        data = await anyio.to_thread.run_sync(encode, manifest)
        await storage.write(attempt, FILE_NAME, data)
        # From here to the end nothing may come between the store and our knowing what it did.
        with anyio.CancelScope(shield=True):
            await storage.publish(attempt, overwrite=request.overwrite)
            session.attempt = None
    return manifest


def _versions() -> dict[str, str]:
    """Return the versions of the libraries that shape the format."""
    versions = {"python": platform.python_version()}
    for name in ("ckpt-jax", "jax", "numpy", "tensorstore"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return versions
