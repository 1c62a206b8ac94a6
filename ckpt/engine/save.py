"""The save flow: plan, stage, write, record, publish. Reads top to bottom."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import platform
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import anyio

from ckpt.commit import CommitHooks
from ckpt.digests import digest
from ckpt.engine.arena import Arena
from ckpt.engine.batches import Batches
from ckpt.engine.buffers import Buffers
from ckpt.engine.parts import ItemParts
from ckpt.engine.plans import PlanCache
from ckpt.engine.session import Batch, SaveSession
from ckpt.engine.writer import EngineItemWriter
from ckpt.errors import InvalidArgumentError, StorageError, located
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
    encode,
)
from ckpt.settings import Staging
from ckpt.storage.base import Attempt, Storage

__all__ = ["SaveEngine", "SaveRequest", "features", "keep_lease", "save_step"]

logger = logging.getLogger("ckpt")

# Stands for one that is still to come, so that the items keep the order in which they were given.
_NO_ENTRY = ItemEntry(handler="")
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


async def save_step(
    engine: SaveEngine,
    storage: Storage,
    request: SaveRequest,
    hooks: CommitHooks,
    batches: Batches,
    *,
    may_write: Callable[[], Awaitable[object]],
) -> Manifest:
    """Save one step and publish it; on any failure or cancellation leave nothing behind.

    Args:
        engine: The engine.
        storage: Where to.
        request: Under which name, and what beside the items.
        hooks: The commit to move along.
        batches: The items; published when they have ended.
        may_write: Awaited before anything but the empty attempt is written.

    Returns:
        The manifest of the published step.

    Raises:
        CheckpointError: What went wrong; further failures are among its notes.

    Cancellation: input and output under way is waited for, the attempt is removed, and nothing of
    it is visible, unless publishing had begun: then the step is whole.
    """
    created_ns = engine.now_ns()
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
                    # Saves in parts may go on beside others, and have a structure of their own.
                    PlanCache(engine.plans.rules) if batches.in_parts else engine.plans,
                    tasks,
                    created_ns,
                    {} if batches.in_parts else None,
                )
                keeper = anyio.CancelScope()
                tasks.start_soon(_begin, session, request, may_write, keeper)
                manifest = await _run(session, engine, request, batches)
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
    session.tasks.start_soon(keep_lease, session.storage, session.attempt, keeper)
    await may_write()
    session.attempt_ready.set()


async def keep_lease(storage: Storage, attempt: Attempt, keeper: anyio.CancelScope) -> None:
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
    batches: Batches,
) -> Manifest:
    hooks = session.hooks
    pending: dict[_Pending, None] = {}
    entries: dict[str, ItemEntry] = {}
    try:
        async with anyio.create_task_group() as commits:
            while (batch := await batches.next()) is not None:
                request = replace(request, unnamed=batch.unnamed)
                entries |= dict.fromkeys(batch.items, _NO_ENTRY)
                for each in await _stage_batch(session, engine, batch, pending):
                    commits.start_soon(_commit_item, session, each, entries, pending)
        if session.parts is not None:
            await _join_parts(session, engine, entries)
    finally:
        for each in pending:
            each.close()
    # Past this point a cancelled save may still be published; before it, never.
    await anyio.lowlevel.checkpoint()
    hooks.stage("publishing")
    hooks.watch.note(written=hooks.watch.elapsed)
    with session.recorder.phase("record"), hooks.watch.taking("merged"):
        manifest = await _record(session, engine, request, entries)
    # From here to the end nothing may come between the store and our knowing what it did.
    with session.recorder.phase("publish"), anyio.CancelScope(shield=True):
        with hooks.watch.taking("published"):
            await session.storage.publish(await session.opened(), overwrite=request.overwrite)
        session.attempt = None
    return manifest


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """An item that is staged: who saves it, and the commit that the handler gave for it."""

    name: str
    handler: Handler
    writer: EngineItemWriter
    commit: Awaitable[ItemEntry]

    def close(self) -> None:
        """Say that the commit is over, or will not be awaited."""
        close = getattr(self.commit, "close", None)
        if callable(close):
            close()


async def _stage_batch(
    session: SaveSession, engine: SaveEngine, batch: Batch, pending: dict[_Pending, None]
) -> list[_Pending]:
    """Take a snapshot of all items of a batch; return them once the caller may go on."""
    hooks = session.hooks
    hooks.stage("staging")
    before = set(pending)
    with session.recorder.phase("blocked"):
        async with anyio.create_task_group() as stagers:
            for name in list(batch.items):
                # The task alone keeps the caller's object, and only while it stages.
                item = partial(_stage_item, session, engine.handlers, batch, name)
                stagers.start_soon(item, batch.items.pop(name), pending)
        if engine.plans.rules is not None and session.parts is None:
            engine.plans.rules.check_used(session.formatted)
        hooks.stage("writing")
        session.end_staging(batch)
    now = time.perf_counter()
    hooks.watch.note(blocked=(hooks.watch.taken.blocked or 0.0) + now - batch.began)
    batch.on_safe()
    batch.returned.set()
    return [each for each in pending if each not in before]


async def _stage_item(
    session: SaveSession,
    handlers: Handlers,
    batch: Batch,
    name: str,
    item: Any,
    pending: dict[_Pending, None],
) -> None:
    handler = handlers.for_item(name, item)
    parts = None
    if session.parts is not None:
        parts = session.parts.get(name)
        if parts is not None:
            parts.check_next(name, handler.name)
        parts = session.parts[name] = parts or ItemParts(handler.name)
    writer = EngineItemWriter(session, batch, name, parts)
    with errors_of(handler, name, "save it"):
        commit = await handler.stage(item, writer)
        if not hasattr(commit, "__await__"):
            raise TypeError(f"stage returned {commit!r:.80}, which cannot be awaited")
        pending[_Pending(name, handler, writer, commit)] = None


async def _commit_item(
    session: SaveSession,
    item: _Pending,
    entries: dict[str, ItemEntry],
    pending: dict[_Pending, None],
) -> None:
    with errors_of(item.handler, item.name, "save it"):
        entry = await item.commit
        if not isinstance(entry, ItemEntry):
            raise TypeError(f"the commit gave {entry!r:.80}, which is no ItemEntry")
    if session.parts is None:
        entries[item.name] = entry
    else:
        session.parts[item.name].entries[item.writer.part] = entry
    item.close()
    # Parts that are done must not add up.
    del pending[item]


async def _join_parts(
    session: SaveSession, engine: SaveEngine, entries: dict[str, ItemEntry]
) -> None:
    """Write what lies over all parts of each item, and make the entries of the items."""
    if engine.plans.rules is not None:
        engine.plans.rules.check_used(session.formatted)
    async with anyio.create_task_group() as writers:
        for name, parts in (session.parts or {}).items():
            with located(item=name):
                entry, files = await anyio.to_thread.run_sync(parts.whole, session.created_ns)
            entries[name] = entry
            for path, data in files.items():
                writers.start_soon(session.write, f"{name}/{path}", data)


async def _record(
    session: SaveSession,
    engine: SaveEngine,
    request: SaveRequest,
    entries: Mapping[str, ItemEntry],
) -> Manifest:
    """Write what is left of the Orbax view, then the manifest; all of it is durable on return."""
    if not entries:
        # Nobody could read such a step.
        raise InvalidArgumentError("there is no item to save: a step has at least one")
    attempt = await session.opened()
    committed_ns = engine.now_ns()
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
            requires=features(entries),
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
            statistics=session.hooks.watch.early(),
            files=session.files,
        )
        encoded = await anyio.to_thread.run_sync(encode, manifest)
    await session.storage.write(attempt, FILE_NAME, encoded)
    return manifest


def features(items: Mapping[str, ItemEntry]) -> list[str]:
    """Return the features that a reader has to know."""
    compressed = any(leaf.codec is not None for item in items.values() for leaf in item.leaves)
    return [COMPRESSION] if compressed else []
