"""The save flow: begin, plan, stage, write, record, publish. Reads top to bottom."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from msgspec import Struct
from msgspec.structs import replace

from ckpt._commit import CommitHooks
from ckpt._engine.engine import BaseStep, Engine
from ckpt._engine.plan_cache import PlanCache
from ckpt._engine.save.item_writer import EngineItemWriter
from ckpt._engine.save.merged_items import ItemParts
from ckpt._engine.save.save_request import SaveCall, SaveCalls, SaveRequest, renew_lease, time_limit
from ckpt._engine.save.session import SaveSession
from ckpt._events import EventRecorder
from ckpt._format.manifest import ItemEntry, Manifest
from ckpt._runtime.threads import run_in_thread, short_switch_interval
from ckpt.errors import CorruptCheckpointError, located
from ckpt.handlers._base import Handler, errors_of, is_per_process
from ckpt.storage._base import Attempt, Storage
from ckpt.storage._manifests import files_folder

if TYPE_CHECKING:
    from ckpt._job.solo import JobSave

# A placeholder, so that the items keep the order in which they were given.
_NO_ENTRY = ItemEntry(handler="")


async def save_step(
    engine: Engine,
    storage: Storage,
    request: SaveRequest,
    hooks: CommitHooks,
    calls: SaveCalls,
    processes: JobSave,
    *,
    may_write: Callable[[], Awaitable[object]] = anyio.lowlevel.checkpoint,
) -> Manifest:
    """Save one step and publish it; on any failure or cancellation leave nothing behind.

    Args:
        engine: The engine.
        storage: Storage of the root.
        request: Name of the step, and the data beside the items.
        hooks: Hooks of the commit, which report its progress.
        calls: The calls that bring the items; the step is published when they have ended.
        processes: The part of this process in the save of its job; the caller has entered its
            operation.
        may_write: Awaited before anything but the empty attempt is written.

    Returns:
        The manifest of the published step; if another process has published it, without its leaves
        and files.

    Raises:
        CheckpointError: The failure, in this process or another; further failures are among its
            notes.
        CoordinationTimeoutError: Another process gave no sign of life; names it.
        DeadlineExceededError: The step was not published at the timeout of the request.

    Cancellation: waits for input and output under way and removes the attempt, so that nothing of
    it is visible, unless publishing has begun: then the step is whole.
    """
    # No step comes before a one-shot checkpoint.
    shares = request.step is not None and not calls.in_parts and storage.traits.shares_files
    last = engine.base_step if shares else None
    if last is not None and last.storage is not storage:
        last = None
    created_ns = engine.now_ns() if request.times_ns is None else request.times_ns[0]
    recorder = EventRecorder("save", request.step, engine.observers)
    try:
        with (
            located(step=request.step),
            short_switch_interval(),
            time_limit(request.timeout, hooks),
        ):
            async with anyio.create_task_group() as tasks:
                session = SaveSession(
                    engine,
                    storage,
                    hooks,
                    recorder,
                    # Saves in parts may go on beside others, and have a structure of their own.
                    PlanCache(engine.plans.rules) if calls.in_parts else engine.plans,
                    tasks,
                    {each.name: each.begin_save() for each in engine.extensions},
                    created_ns,
                    processes,
                    parts={} if calls.in_parts else None,
                    shares=shares,
                    last=last,
                )
                renewal = anyio.CancelScope()
                tasks.start_soon(_begin, session, request, may_write, renewal)
                manifest = await _run(session, request, calls)
                renewal.cancel()
        if session.saved:
            engine.base_step = BaseStep(
                storage, files_folder(request.step_dir, manifest), session.saved
            )
        for extension in engine.extensions if processes.publishes else ():
            extension.committed(manifest, f"{storage.location}/{request.step_dir}")
        return manifest
    except BaseException as error:
        # Settled before anything is removed: the removal causes errors elsewhere that hide this
        # one.
        agreed = await processes.settle(error)
        if agreed is error:
            raise
        raise agreed from error
    finally:
        # The task group has ended, and with it every use of the staged memory.
        session.free_all()
        if session.attempt is not None:
            with anyio.CancelScope(shield=True):
                await processes.discard(storage, session.attempt)


async def _begin(
    session: SaveSession,
    request: SaveRequest,
    may_write: Callable[[], Awaitable[object]],
    renewal: anyio.CancelScope,
) -> None:
    """Begin the attempt while the tree is planned; let the items write when it is our turn."""
    storage = session.storage

    async def begin() -> Attempt:
        session.attempt = await storage.begin(request.step_dir)
        session.tasks.start_soon(renew_lease, storage, session.attempt, renewal)
        return session.attempt

    started = await session.processes.begin(
        begin, partial(storage.join, request.step_dir), session.created_ns
    )
    session.attempt, session.save = started.attempt, started.save
    session.created_ns = started.created_ns
    session.begun.set()
    await may_write()
    session.attempt_ready.set()


async def _run(session: SaveSession, request: SaveRequest, calls: SaveCalls) -> Manifest:
    """Stage the items of every call and commit them after the caller has returned; then publish."""
    hooks, rules = session.hooks, session.plans.rules
    pending: dict[_Pending, None] = {}
    entries: dict[str, ItemEntry] = {}
    try:
        async with anyio.create_task_group() as commits:
            while (call := await calls.next()) is not None:
                request = replace(request, unnamed=call.unnamed)
                entries |= dict.fromkeys(call.items, _NO_ENTRY)
                hooks.stage("staging")
                before = set(pending)
                with session.recorder.phase("blocked"):
                    async with anyio.create_task_group() as stagers:
                        for name in list(call.items):
                            # Only the task keeps the caller's object, and only while it stages.
                            item = partial(_stage_item, session, call, name)
                            stagers.start_soon(item, call.items.pop(name), pending)
                    if rules is not None and session.parts is None:
                        rules.check_used(session.formatted)
                    for notes in session.extensions.values() if session.parts is None else ():
                        notes.check_items()
                    hooks.stage("writing")
                    session.end_staging(call)
                hooks.watch.add("blocked", call.began)
                call.on_snapshot()
                call.caller_released.set()
                for each in [each for each in pending if each not in before]:
                    commits.start_soon(_commit_item, session, each, entries, pending)
                # Finished items must not be kept until the next call, which may be long in coming.
                del before
        if session.parts is not None:
            await _join_parts(session, entries)
    finally:
        for each in pending:
            each.close()
    # These files were shared before the damage was known; the caller's arrays may be gone.
    for path, file in session.files.items():
        if file.shared and path in session.engine.damaged:
            raise CorruptCheckpointError(
                f"{path}, which it shares with the step before, was found damaged while it was "
                "saved. Nothing of it is left; the next save shares that file no more"
            )
    # Past this point a cancelled save may still be published; before it, never.
    await anyio.lowlevel.checkpoint()
    hooks.stage("publishing")
    hooks.watch.note(written=hooks.watch.elapsed)
    # A process that cannot write to the attempt must not report, not even an empty report.
    await session.opened()
    return await session.processes.publish(session, request, entries)


class _Pending(Struct, frozen=True, eq=False):
    """An item that is staged: its handler, its writer, and the commit that the handler gave."""

    name: str
    handler: Handler
    writer: EngineItemWriter
    commit: Awaitable[ItemEntry]

    def close(self) -> None:
        """Close the commit, which is over or will not be awaited."""
        close = getattr(self.commit, "close", None)
        if callable(close):
            close()


async def _stage_item(
    session: SaveSession,
    call: SaveCall,
    name: str,
    item: Any,
    pending: dict[_Pending, None],
) -> None:
    handler = session.engine.handlers.for_item(name, item)
    parts = None
    if session.parts is not None:
        parts = session.parts.get(name)
        if parts is not None:
            parts.check_next(name, handler.name)
        parts = session.parts[name] = parts or ItemParts(handler.name)
    own = is_per_process(handler)
    writer = EngineItemWriter(session, call, name, parts, per_process=own)
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
        entries[item.name] = await item.writer.finish(entry)
    session.hooks.durable(item.name)
    # Finished parts must not accumulate.
    del pending[item]


async def _join_parts(session: SaveSession, entries: dict[str, ItemEntry]) -> None:
    """Write what covers all parts of each item, and make the entries of the items."""
    if session.plans.rules is not None:
        session.plans.rules.check_used(session.formatted)
    async with anyio.create_task_group() as writers:
        for name, parts in (session.parts or {}).items():
            with located(item=name):
                entry, files = await run_in_thread(
                    parts.whole, name, session.engine.sidecars, session.created_ns
                )
            entries[name] = entry
            for path, data in files.items():
                writers.start_soon(session.write, path, data)
