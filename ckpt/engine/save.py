"""The save flow: plan, stage, write, record, publish. Reads top to bottom."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import logging
import platform
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio

from ckpt.commit import CommitHooks
from ckpt.engine.arena import Arena
from ckpt.engine.buffers import Buffers
from ckpt.engine.plans import PlanCache
from ckpt.engine.session import SaveSession
from ckpt.engine.writer import EngineItemWriter
from ckpt.errors import StorageError, located
from ckpt.events import Observer, Recorder
from ckpt.handlers.base import Handler, errors_of
from ckpt.handlers.registry import Handlers
from ckpt.layout.orbax_view import step_view, text_view
from ckpt.manifest import (
    COMPRESSION,
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
from ckpt.storage.base import Attempt, Storage

__all__ = ["SaveEngine", "SaveRequest", "save_step"]

logger = logging.getLogger("ckpt")

# Some may fail or come late before a lease runs out.
_RENEWALS = 6


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
        versions: Versions of the libraries that write.
    """

    staging: Staging
    handlers: Handlers
    observers: tuple[Observer, ...]
    arena: Arena
    buffers: Buffers
    plans: PlanCache = field(default_factory=PlanCache)
    versions: dict[str, str] = field(default_factory=_versions)


async def save_step(
    engine: SaveEngine,
    storage: Storage,
    request: SaveRequest,
    hooks: CommitHooks,
    *,
    on_safe: Callable[[], None],
    on_staged: Callable[[], None],
    may_write: Callable[[], Awaitable[object]],
) -> Manifest:
    """Save one step and publish it; on any failure or cancellation leave nothing behind.

    Args:
        engine: The engine.
        storage: Where to.
        request: What.
        hooks: The commit to move along.
        on_safe: Called once the caller may change or donate everything it passed.
        on_staged: Called once no more staging memory is needed.
        may_write: Awaited before anything but the empty attempt is written.

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
                    hooks,
                    recorder,
                    engine.plans,
                    tasks,
                    created_ns,
                    on_staged,
                )
                keeper = anyio.CancelScope()
                tasks.start_soon(_begin, session, request, may_write, keeper)
                manifest = await _run(session, engine, request, on_safe)
                keeper.cancel()
        return manifest
    finally:
        # The task group has ended, and with it every use of the staged memory.
        session.free_all()
        if session.attempt is not None:
            with anyio.CancelScope(shield=True):
                await storage.discard(session.attempt)


async def _begin(
    session: SaveSession,
    request: SaveRequest,
    may_write: Callable[[], Awaitable[object]],
    keeper: anyio.CancelScope,
) -> None:
    """Open the attempt while the tree is planned, and the way to it when it is our turn."""
    await session.storage.prepare()
    session.attempt = await session.storage.begin(request.entry)
    session.tasks.start_soon(_keep_lease, session.storage, session.attempt, keeper)
    await may_write()
    session.attempt_ready.set()


async def _keep_lease(storage: Storage, attempt: Attempt, keeper: anyio.CancelScope) -> None:
    """Renew the lease of an attempt until `keeper` is cancelled."""
    with keeper:
        while True:
            await anyio.sleep(storage.lease_seconds / _RENEWALS)
            # Whether the attempt is still ours is decided when it is published.
            try:
                await storage.renew(attempt)
            except StorageError as error:
                logger.warning("the lease of an attempt was not renewed: %s", error)


async def _run(
    session: SaveSession,
    engine: SaveEngine,
    request: SaveRequest,
    on_safe: Callable[[], None],
) -> Manifest:
    hooks = session.hooks
    hooks.stage("staging")
    blocked = contextlib.ExitStack()
    blocked.enter_context(session.recorder.phase("blocked"))
    names = list(request.items)
    pending: dict[str, _Pending] = {}
    try:
        async with anyio.create_task_group() as stagers:
            for name in names:
                # The task alone keeps the caller's object, and only while it stages.
                stagers.start_soon(
                    _stage_item, session, engine.handlers, name, request.items.pop(name), pending
                )
        if engine.plans.rules is not None:
            engine.plans.rules.check_used(session.formatted)
        hooks.stage("writing")
        session.end_staging()
        blocked.close()
        on_safe()
        session.returned.set()
        entries: dict[str, ItemEntry] = {}
        async with anyio.create_task_group() as commits:
            for name in names:
                commits.start_soon(_commit_item, name, pending[name], entries)
    finally:
        for each in pending.values():
            each.close()
    entries = {name: entries[name] for name in names}
    # Past this point a cancelled save may still be published; before it, never.
    await anyio.lowlevel.checkpoint()
    hooks.stage("publishing")
    with session.recorder.phase("record"):
        manifest = await _record(session, engine, request, entries)
    # From here to the end nothing may come between the store and our knowing what it did.
    with session.recorder.phase("publish"), anyio.CancelScope(shield=True):
        await session.storage.publish(await session.opened(), overwrite=request.overwrite)
        session.attempt = None
    return manifest


@dataclass(frozen=True, slots=True)
class _Pending:
    """An item that is staged: its handler, and the commit that the handler gave for it."""

    handler: Handler
    commit: Awaitable[ItemEntry]

    def close(self) -> None:
        """Say that the commit is over, or will not be awaited."""
        close = getattr(self.commit, "close", None)
        if callable(close):
            close()


async def _stage_item(
    session: SaveSession, handlers: Handlers, name: str, item: Any, pending: dict[str, _Pending]
) -> None:
    handler = handlers.for_item(name, item)
    with errors_of(handler, name, "save it"):
        commit = await handler.stage(item, EngineItemWriter(session, name))
        if not hasattr(commit, "__await__"):
            raise TypeError(f"stage returned {commit!r:.80}, which cannot be awaited")
        pending[name] = _Pending(handler, commit)


async def _commit_item(name: str, item: _Pending, entries: dict[str, ItemEntry]) -> None:
    with errors_of(item.handler, name, "save it"):
        entry = await item.commit
        if not isinstance(entry, ItemEntry):
            raise TypeError(f"the commit gave {entry!r:.80}, which is no ItemEntry")
        entries[name] = entry


async def _record(
    session: SaveSession,
    engine: SaveEngine,
    request: SaveRequest,
    entries: Mapping[str, ItemEntry],
) -> Manifest:
    """Write what is left of the Orbax view, then the manifest; all of it is durable on return."""
    attempt = await session.opened()
    committed_ns = time.time_ns()
    files = step_view(
        request.entry,
        entries,
        request.metrics,
        request.metadata,
        session.created_ns,
        committed_ns,
        session.files,
    )
    for name, entry in entries.items():
        texts = await anyio.to_thread.run_sync(text_view, entry)
        files.update({f"{name}/{path}": data for path, data in texts.items()})
    async with anyio.create_task_group() as writers:
        for path, data in files.items():
            known = session.files[path] = FileEntry(size=len(data), digest=digest(data))
            writers.start_soon(session.write, path, data, known)
        manifest = Manifest(
            format="ckpt",
            version=FORMAT_VERSION,
            requires=_features(entries),
            step=request.step,
            attempt=attempt.id,
            unnamed=request.unnamed,
            items=dict(entries),
            metrics=None if request.metrics is None else dict(request.metrics),
            metadata=request.metadata,
            created_ns=session.created_ns,
            committed_ns=committed_ns,
            writer=engine.versions,
            process_count=1,
            files=session.files,
        )
        encoded = await anyio.to_thread.run_sync(encode, manifest)
    await session.storage.write(attempt, FILE_NAME, encoded)
    return manifest


def _features(items: Mapping[str, ItemEntry]) -> list[str]:
    """Return the features that a reader has to know."""
    compressed = any(leaf.codec is not None for item in items.values() for leaf in item.leaves)
    return [COMPRESSION] if compressed else []
