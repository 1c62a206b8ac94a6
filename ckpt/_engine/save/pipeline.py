"""The save flow: begin, plan, stage, write, record, publish. Reads top to bottom."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
from msgspec import Struct
from msgspec.structs import replace

from ckpt._commit import CommitHooks
from ckpt._engine.engine import Engine
from ckpt._engine.last_save import LastSave
from ckpt._engine.plan_cache import PlanCache
from ckpt._engine.save.deadline import given_up_after
from ckpt._engine.save.item_writer import EngineItemWriter
from ckpt._engine.save.joint.multihost import JointSave
from ckpt._engine.save.kept_lease import keep_lease
from ckpt._engine.save.merged_items import ItemParts
from ckpt._engine.save.publication import publish
from ckpt._engine.save.request import SaveCall, SaveCalls, SaveRequest
from ckpt._engine.save.session import SaveSession
from ckpt._engine.signs.odd_values import warn_of_odd_values
from ckpt._events import EventRecorder
from ckpt._format.manifest import ItemEntry, Manifest
from ckpt._plan.unchanged.frozen_leaves import FrozenLeaves
from ckpt._runtime.interpreter import quick_switches
from ckpt._runtime.threads import run_in_thread
from ckpt.errors import CorruptCheckpointError, located
from ckpt.handlers._base import Handler, errors_of, is_per_process
from ckpt.handlers._registry import Handlers
from ckpt.storage._base import Attempt, Storage, can_share
from ckpt.storage._manifests import lies_in

# A placeholder, so that the items keep the order in which they were given.
_NO_ENTRY = ItemEntry(handler="")


async def save_step(
    engine: Engine,
    storage: Storage,
    request: SaveRequest,
    hooks: CommitHooks,
    calls: SaveCalls,
    processes: JointSave,
    *,
    may_write: Callable[[], Awaitable[object]] = anyio.lowlevel.checkpoint,
) -> Manifest:
    """Save one step and publish it; on any failure or cancellation leave nothing behind.

    Args:
        engine: The engine.
        storage: Where to.
        request: Under which name, and what beside the items.
        hooks: The commit to move along.
        calls: The items; published when they have ended.
        processes: The processes of the job that save the same step at a time; the caller takes
            part in it.
        may_write: Awaited before anything but the empty attempt is written.

    Returns:
        The manifest of the published step; where another process has published it, without its
        leaves and files.

    Raises:
        CheckpointError: What went wrong, here or in another process; further failures are among its
            notes.
        CoordinationTimeoutError: Another process gave no sign of life; names it.
        DeadlineExceededError: It was not published at the deadline of the request.

    Cancellation: input and output under way is waited for, the attempt is removed, and nothing of
    it is visible, unless publishing had begun: then the step is whole.
    """
    # A one-shot checkpoint has none before it.
    shares = request.step is not None and not calls.in_parts and can_share(storage)
    created_ns = engine.now_ns() if request.times_ns is None else request.times_ns[0]
    recorder = EventRecorder("save", request.step, engine.observers)
    try:
        with (
            located(step=request.step),
            quick_switches(),
            given_up_after(request.deadline, hooks),
        ):
            async with anyio.create_task_group() as tasks:
                session = SaveSession(
                    storage,
                    engine.staging,
                    engine.arena,
                    hooks,
                    recorder,
                    # Saves in parts may go on beside others, and have a structure of their own.
                    PlanCache(engine.plans.rules) if calls.in_parts else engine.plans,
                    tasks,
                    engine.vital_signs,
                    engine.kernels,
                    FrozenLeaves(engine.frozen),
                    created_ns,
                    processes,
                    parts={} if calls.in_parts else None,
                    shares=shares,
                    last=_last_save(engine, storage) if shares else None,
                    damaged=engine.damaged,
                    writes_later=engine.writes_later,
                )
                keeper = anyio.CancelScope()
                tasks.start_soon(_begin, session, request, may_write, keeper)
                manifest = await _run(session, engine, request, calls)
                keeper.cancel()
        if session.saved:
            engine.last_save = LastSave(storage, lies_in(request.step_dir, manifest), session.saved)
        if processes.publishes:
            warn_of_odd_values(engine, manifest, f"{storage.location}/{request.step_dir}")
        return manifest
    except BaseException as error:
        # Before anything is removed: what that makes the others meet is not what went wrong.
        agreed = await processes.settle(error)
        if agreed is error:
            raise
        raise agreed from error
    finally:
        # The task group has ended, and with it every use of the staged memory.
        session.free_all()
        if session.attempt is not None:
            with anyio.CancelScope(shield=True):
                await storage.discard(session.attempt, joined=not processes.is_alone)


def _last_save(engine: Engine, storage: Storage) -> LastSave | None:
    last = engine.last_save
    return last if last is not None and last.storage is storage else None


async def _begin(
    session: SaveSession,
    request: SaveRequest,
    may_write: Callable[[], Awaitable[object]],
    keeper: anyio.CancelScope,
) -> None:
    """Open the attempt while the tree is planned; let the items write when it is our turn."""
    storage = session.storage

    async def begin() -> Attempt:
        session.attempt = await storage.begin(request.step_dir)
        session.tasks.start_soon(keep_lease, storage, session.attempt, keeper)
        return session.attempt

    started = await session.processes.begin(
        begin, partial(storage.join, request.step_dir), session.created_ns
    )
    session.attempt, session.save, session.created_ns = (
        started.attempt,
        started.save,
        started.created_ns,
    )
    session.begun.set()
    await may_write()
    session.attempt_ready.set()


async def _run(
    session: SaveSession, engine: Engine, request: SaveRequest, calls: SaveCalls
) -> Manifest:
    """Stage the items of every call and commit them behind the caller's back; then publish."""
    hooks, rules = session.hooks, engine.plans.rules
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
                            # The task alone keeps the caller's object, and only while it stages.
                            item = partial(_stage_item, session, engine.handlers, call, name)
                            stagers.start_soon(item, call.items.pop(name), pending)
                    if rules is not None and session.parts is None:
                        rules.check_used(session.formatted)
                    if session.parts is None:
                        session.frozen.check_used()
                    hooks.stage("writing")
                    session.end_staging(call)
                hooks.watch.add_blocked(call.began)
                call.on_safe()
                call.returned.set()
                for each in [each for each in pending if each not in before]:
                    commits.start_soon(_commit_item, session, each, entries, pending)
                # Until the next call, which may be long, items that are done must not be kept.
                del before
        if session.parts is not None:
            await _join_parts(session, engine, entries)
    finally:
        for each in pending:
            each.close()
    # Taken over before that was known; what the caller has given may be gone.
    for path, file in session.files.items():
        if file.shared and path in session.damaged:
            raise CorruptCheckpointError(
                f"{path}, which it shares with the step before, was found damaged while it was "
                "saved. Nothing of it is left; the next save shares that file no more"
            )
    # Past this point a cancelled save may still be published; before it, never.
    await anyio.lowlevel.checkpoint()
    hooks.stage("publishing")
    hooks.watch.note(written=hooks.watch.elapsed)
    return await publish(session, engine, request, entries)


class _Pending(Struct, frozen=True, eq=False):
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


async def _stage_item(
    session: SaveSession,
    handlers: Handlers,
    call: SaveCall,
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
    item.close()
    # Parts that are done must not add up.
    del pending[item]


async def _join_parts(session: SaveSession, engine: Engine, entries: dict[str, ItemEntry]) -> None:
    """Write the indexes over all parts of each item, and make the entries of the items."""
    if engine.plans.rules is not None:
        engine.plans.rules.check_used(session.formatted)
    async with anyio.create_task_group() as writers:
        for name, parts in (session.parts or {}).items():
            with located(item=name):
                entry, files = await run_in_thread(parts.whole, session.created_ns)
            entries[name] = entry
            for path, data in files.items():
                writers.start_soon(session.write, f"{name}/{path}", data)
