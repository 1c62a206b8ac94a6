"""The steps of one root, read: which there are, what they are, and what they hold."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, get_args

from ckpt._arguments import check_step, one_of, shown, true_or_false
from ckpt._engine.engine import Engine
from ckpt._engine.last_save import restored
from ckpt._engine.restore.pipeline import restore_items
from ckpt._engine.restore.step_files import OtherCopies, StepCopy
from ckpt._engine.restore.virtual_files import files_of
from ckpt._engine.verify.file_selection import read_limits
from ckpt._engine.verify.pipeline import verify_step_dir
from ckpt._engine.verify.report import VerifyReport
from ckpt._events import EventRecorder
from ckpt._format.history import Parent, is_rest_of
from ckpt._format.manifest import JsonValue, Manifest
from ckpt._plan.adapt import Adapt
from ckpt._redaction import redact
from ckpt._runtime.futures import CallingThread
from ckpt._runtime.threads import run_in_thread
from ckpt._settings import ArrayMemory, VerifyMode, checks_devices
from ckpt._steps.index import IndexedStep, StepIndex
from ckpt._steps.opened import OpenedStep
from ckpt._steps.previous_steps import saved_step
from ckpt._steps.processes import Processes
from ckpt._steps.restores.requests import context_of, result_of, wanted_items, what_is_missing
from ckpt._steps.restores.step_choice import RunStart, StepChoice
from ckpt._steps.step_metadata import StepMetadata, describe_step
from ckpt._steps.unreadable import shortened
from ckpt._steps.wrong_paths import opened_checkpoint
from ckpt._tree.suggestions import suggestion
from ckpt._tree.table import size_text
from ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    DeviceMismatchError,
    InvalidArgumentError,
    ItemDroppedError,
    NotACheckpointError,
    StepDeletedError,
    StepNotFoundError,
    StorageError,
)
from ckpt.policies._context import SavedStep
from ckpt.policies._health import Healthy, check_healthy
from ckpt.policies._ranking import BestN, Metric, Mode, best_of
from ckpt.storage._base import Storage
from ckpt.storage._manifests import refuse_deleted, while_read
from ckpt.storage._resolve import PathLike, open_step_dir

logger = logging.getLogger("ckpt")

# A writer that deletes the latest step this often while it is read keeps nothing that one can read.
_LATEST_TRIES = 20

_Load = Callable[[int | None], Awaitable[tuple[int | None, Any]]]
# Finds the copies of a step in other places that hold the same as this manifest says.
Elsewhere = Callable[[Manifest], Awaitable[Sequence[StepCopy]]]


class StepReader:
    """Reads the steps of one root. Its coroutines run on the engine's loop."""

    def __init__(
        self,
        storage: Storage,
        index: StepIndex,
        engine: Engine,
        ranking: BestN | None,
        processes: Processes,
        begins_from: Callable[[Parent | None, int | None], None],
        *,
        may_write: bool,
    ) -> None:
        """Read from `storage`, together with the other processes of the job.

        `ranking` says which step is the best where a call does not. `begins_from` is told of the
        checkpoint that the run has begun from, and of its own step that was restored.
        """
        self._storage = storage
        self._index = index
        self._engine = engine
        self.ranking: BestN | None = ranking
        self._processes = processes
        self.begins_from: Callable[[Parent | None, int | None], None] = begins_from
        self._may_write = may_write
        self.choice: StepChoice = StepChoice(storage, index, processes)
        # The attempts of steps of which it was said which items they lack.
        self._said_missing: set[str] = set()

    async def all_steps(self) -> list[int]:
        """Return every committed step, ascending."""
        return list(await self._processes.steps.refresh())

    async def latest_step(self, healthy: bool | Healthy = False) -> int | None:
        """Return the latest committed step, or the latest healthy one; None without any."""
        wanted = check_healthy(healthy)
        if wanted is not None:
            return (await self.choice.healthy_step(wanted))[0]
        latest = await self._processes.steps.latest()
        return None if latest is None else latest.step

    async def agreed(self, look: Callable[[], Awaitable[Iterable[int]]]) -> list[int]:
        """Return the steps that `look` finds, the same in all processes of a job."""

        async def act() -> list[JsonValue]:
            return list(await look())

        found: Any = await self._processes.decided("tiers", "which steps there are", act)
        return [check_step(step) for step in found]

    async def best_step(self, metric: Metric | None, mode: Mode | None) -> int | None:
        """Return the step with the best metric, or None; see the managers."""
        steps = list((await self.saved_steps()).values())
        return await run_in_thread(rank, steps, metric, mode, self.ranking)

    async def saved_steps(self) -> dict[int, SavedStep]:
        """Return the committed steps as policies see them, ascending."""
        found = await self._processes.steps.refresh()
        return {step: saved_step(each) for step, each in found.items()}

    async def metadata(self, step: int | None) -> StepMetadata:
        """Return the metadata of `step`, or of the latest one."""
        opened = await self._processes.steps.found(step)
        path = f"{self._storage.location}/{opened.step_dir}"
        return await run_in_thread(describe_step, opened.manifest, path)

    async def manifest(self, step: int) -> Manifest:
        """Return the manifest of `step`."""
        return (await self._processes.steps.found(step)).manifest

    @property
    def damaged(self) -> list[int]:
        """The steps with files that are missing or too short, as far as was seen when listing.

        In a job there are none: what all processes do must not depend on what one has seen.
        """
        if self._processes.count > 1:
            return []
        return [each.step for each in self._index.unreadable if each.kind == "damaged"]

    async def copy(self, step: int) -> StepCopy | None:
        """Return `step` as another copy of what is restored from elsewhere; None if it is none.

        Another library's step is not.
        """
        opened = await self._index.found(step)
        if opened.foreign is not None:
            return None
        files = files_of(self._storage, opened.step_dir, opened.manifest)
        return StepCopy(redact(self._storage.location), opened.manifest, files)

    async def start_of_run(self, healthy: bool | Healthy) -> RunStart:
        """Return where the run begins or goes on; see `StepChoice`."""
        return await self.choice.start_of_run(check_healthy(healthy))

    async def verify(
        self,
        step: int | None,
        deep: bool,
        sample: float | None = None,
        seed: int | None = None,
        deadline: float | None = None,
    ) -> VerifyReport:
        """Compare `step`, or the latest one, with its manifest; see `engine.verification`."""
        limits = read_limits(deep, sample, seed, deadline)
        began = time.perf_counter_ns()
        with self._recorder("verify", step).failing(began):
            for _ in range(_LATEST_TRIES):
                chosen = await self.latest_step() if step is None else check_step(step)
                if chosen is None:
                    raise self._index.no_step()
                step_dirs = await self._index.step_dirs_of(chosen)
                if not step_dirs:
                    raise await self._index.not_found(chosen)
                looked = await self._index.look(step_dirs[0])
                if looked is not None and looked.is_foreign:
                    raise NotACheckpointError(
                        f"{self._storage.location}/{step_dirs[0]} was written by Orbax, without "
                        "digests: there is nothing to compare it with. A restore reads it",
                        step=chosen,
                    )
                try:
                    report = await verify_step_dir(
                        self._storage,
                        step_dirs[0],
                        chosen,
                        deep,
                        self._engine.observers,
                        limits=limits,
                        may_write=self._may_write,
                    )
                except StepNotFoundError as error:
                    deleted = error
                    if step is not None and not await self._lost_items(step_dirs[0], looked):
                        raise
                    continue
                found = f"step {chosen}: {report.path} is damaged"
                self._engine.distrust((each.file for each in report.problems), found)
                self._recorder("verify", chosen).end(began, "ok", nbytes=report.nbytes)
                return report
            raise deleted

    async def _lost_items(self, step_dir: str, known: IndexedStep | None) -> bool:
        """Tell whether a step is still there, and only items were taken out of it."""
        found = await self._index.look(step_dir)
        return found is not None and known is not None and is_rest_of(found, known)

    async def begin_from(
        self,
        source: PathLike,
        target: Any,
        named: bool,
        adapt: Adapt | Mapping[str, Adapt] | None,
    ) -> Any:
        """Return what a checkpoint of another run holds, which this run begins from."""
        began = time.perf_counter()
        storage, step_dir = open_step_dir(source, follow=True)
        opened = await opened_checkpoint(source, storage, step_dir)
        storage, where = opened.storage, opened.location
        processes, manifest = self._processes, opened.manifest
        like, items = (None, target) if named else (target, None)
        async with while_read(storage, opened.step_dir, manifest):
            context = context_of(opened, storage, self._engine, processes.process, processes.count)
            loaded = await restore_items(context, wanted_items(manifest, like, items, adapt))
        # What is written down for others must not hold what opens the store.
        self.begins_from(Parent(redact(where), manifest.step, manifest.attempt), None)
        logger.info(
            "a new run begins from %s: %s in %.2f s",
            redact(where),
            size_text(sum(context.moved)),
            time.perf_counter() - began,
        )
        return result_of(manifest, loaded, named=named)

    async def resume(
        self,
        start: RunStart,
        target: Any,
        named: bool,
        adapt: Adapt | Mapping[str, Adapt] | None,
        fallback: bool,
        healthy: bool | Healthy,
        caller: CallingThread,
    ) -> tuple[int, Any]:
        """Return the step after the one of `start`, and what that holds; see the managers."""
        true_or_false("fallback", fallback)
        load = partial(
            self.load,
            latest=start.latest,
            like=None if named else target,
            items=target if named else None,
            at=None,
            adapt=adapt,
            broadcast_bytes=None,
            caller=caller,
        )
        wanted = check_healthy(healthy)
        step, found = await self._newest(load, fallback, wanted, start)
        return check_step(step) + 1, found

    async def restore(
        self,
        step: int | None,
        like: Any,
        items: Mapping[str, Any] | Iterable[str] | None,
        at: str | None,
        adapt: Adapt | Mapping[str, Adapt] | None,
        broadcast_bytes: int | None,
        fallback: bool,
        healthy: bool | Healthy,
        memory: ArrayMemory,
        verify: VerifyMode | None,
        caller: CallingThread,
    ) -> Any:
        """Load a step, or the latest one: then the next one where it is deleted meanwhile.

        Several processes load the same step, and all of them fail where one does. With
        `broadcast_bytes` they share what they read, by programs that `caller` runs. With
        `fallback`, a damaged step is passed over for the one before it; with `healthy`, all that
        are not known to be healthy.
        """
        true_or_false("fallback", fallback)
        wanted = check_healthy(healthy)
        one_of("memory", memory, get_args(ArrayMemory))
        step = None if step is None else check_step(step)
        # It may be asked for more than once.
        items = list(items) if isinstance(items, Iterator) else items
        load = partial(
            self.load,
            like=like,
            items=items,
            at=at,
            adapt=adapt,
            broadcast_bytes=broadcast_bytes,
            caller=caller,
            memory=memory,
            is_checked=checks_devices(verify),
        )
        if step is not None:
            check_one_step(step, fallback, wanted)
        found = await (load(step) if step is not None else self._newest(load, fallback, wanted))
        return found[1]

    async def _newest(
        self, load: _Load, fallback: bool, wanted: Healthy | None, start: RunStart | None = None
    ) -> tuple[int | None, Any]:
        """Load the newest step; each one that is passed over is named in a warning.

        Args:
            load: Loads a step; None is the latest.
            fallback: Pass over steps that are damaged, or lack an item that is wanted.
            wanted: Pass over those that are not healthy by it.
            start: Where the run goes on, which saves those anew; None for a restore alone.
        """
        first: CorruptCheckpointError | ItemDroppedError | None = None
        tried: set[int] = set()
        gone = 0
        choose = partial(self.choice.step_for_all, wanted, tried, goes_back=start is not None)
        # Listing every step takes long in a large root, and is seldom needed.
        chosen = None if start is None else start.healthy
        if wanted is not None and chosen is None:
            chosen = await choose()
        while True:
            damage: str | None = None
            step = chosen
            try:
                return await load(chosen)
            except (StepDeletedError, StepNotFoundError):
                # Deleted or replaced since it was chosen: another one is, or the new one.
                gone += 1
                if chosen is None or gone == _LATEST_TRIES:
                    raise
            except (CorruptCheckpointError, ItemDroppedError) as error:
                step = error.step if chosen is None else chosen
                if step is None or not fallback:
                    raise
                damage = error.message if isinstance(error, CorruptCheckpointError) else None
                first = first or error
                tried.add(step)
                logger.warning("step %d is passed over for the one before it: %s", step, error)
            assert step is not None
            try:
                chosen = await choose(None if damage is None else (step, damage))
            except StepNotFoundError:
                if first is None:
                    raise
                chosen = None
            if chosen is None and first is not None:
                raise first

    async def load(
        self,
        step: int | None,
        like: Any,
        items: Mapping[str, Any] | Iterable[str] | None,
        at: str | None,
        adapt: Adapt | Mapping[str, Adapt] | None,
        broadcast_bytes: int | None,
        caller: CallingThread,
        memory: ArrayMemory = "jax",
        is_checked: bool = False,
        latest: OpenedStep | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> tuple[int | None, Any]:
        """Load a step, or the latest one; return it with what it holds.

        What is damaged in it is read from the copies that `elsewhere` finds.
        """
        began = time.perf_counter_ns()
        engine, processes = self._engine, self._processes
        with self._recorder("restore", step).failing(began):
            known: Manifest | None = None
            deleted: StepDeletedError | None = None
            for _ in range(_LATEST_TRIES):
                is_another = False
                # Found a moment ago; if it is gone, the next one is looked for.
                known_latest = latest if step is None and deleted is None else None
                try:
                    async with processes.restoring(
                        step, known_latest, broadcast_bytes, caller
                    ) as found:
                        opened = found.opened
                        manifest = opened.manifest
                        # One that has lost items meanwhile is still the step that was asked for.
                        if step is not None and deleted is not None and known is not None:
                            is_another = not is_rest_of(manifest, known)
                            if is_another:
                                raise deleted
                        known = manifest
                        copies, is_own = None, opened.foreign is None
                        # In a job, each process may have another part of the step.
                        if elsewhere is not None and is_own and processes.count == 1:
                            copies = OtherCopies(partial(elsewhere, manifest))
                        async with while_read(self._storage, opened.step_dir, manifest):
                            context = context_of(
                                opened,
                                self._storage,
                                engine,
                                processes.process,
                                processes.count,
                                processes.observers,
                                found.broadcast,
                                memory,
                                checks_devices=is_checked,
                                copies=copies,
                            )
                            wanted = wanted_items(manifest, like, items, adapt, at)
                            loaded = await restore_items(context, wanted)
                except ItemDroppedError as error:
                    raise await self._with_steps(error) from None
                except StepNotFoundError as error:
                    if isinstance(error, StepDeletedError) and not is_another:
                        deleted = error
                        continue
                    if step is None or deleted is None:
                        raise
                    raise deleted from deleted.__cause__
                except CheckpointError as error:
                    # Of a job, also where another process has found it.
                    if known is not None and _tells_of_damage(error, self._storage):
                        self.distrust(known)
                    raise
                nbytes = sum(context.moved)
                self.begins_from(manifest.parent, manifest.step)
                if self._may_write and (engine.last_save is None or engine.last_save.was_restored):
                    engine.last_save = restored(self._storage, opened.step_dir, manifest)
                if copies is not None and copies.first is not None:
                    self.distrust(manifest)
                    await self._say_elsewhere(opened.step_dir, manifest, copies)
                self._recorder("restore", manifest.step).end(began, "ok", nbytes=nbytes)
                seconds = (time.perf_counter_ns() - began) / 1e9
                logger.info(
                    "restored step %s of %s: %s in %.2f s",
                    manifest.step,
                    redact(self._storage.location),
                    size_text(nbytes),
                    seconds,
                )
                if like is None and items is None and at is None:
                    self._say_missing(manifest)
                return manifest.step, result_of(manifest, loaded, named=items is not None)
            assert deleted is not None
            raise deleted

    def distrust(self, manifest: Manifest) -> None:
        """Have no save take over data files of a step that is damaged, whichever of them are."""
        files = (f"{name}/{path}" for name, it in manifest.items.items() for path in it.data_files)
        where = redact(self._storage.location)
        self._engine.distrust(files, f"step {manifest.step} of {where} is damaged")

    async def _with_steps(self, error: ItemDroppedError) -> ItemDroppedError:
        """Return the error of an item that was dropped, with the steps that still have it."""
        found = await self._index.refresh()
        steps = [step for step, each in found.items() if error.item in each.items]
        left = f"steps that still have it: {shortened(steps)}" if steps else "no step has it now"
        return ItemDroppedError(f"{error.message}; {left}", step=error.step, item=error.item)

    def _say_missing(self, manifest: Manifest) -> None:
        """Say once of a step that was restored as a whole what it does not have any more."""
        missing = what_is_missing(manifest)
        if missing and manifest.attempt not in self._said_missing:
            self._said_missing.add(manifest.attempt)
            logger.warning("step %s was restored without some items: %s", manifest.step, missing)

    async def _say_elsewhere(self, step_dir: str, manifest: Manifest, copies: OtherCopies) -> None:
        problem = "is damaged"
        try:
            await refuse_deleted(self._storage, step_dir, manifest)
        except StepDeletedError:
            problem = "was deleted while it was read"
        logger.warning(
            "step %s of %s %s; read instead: %s. %s",
            manifest.step,
            redact(self._storage.location),
            problem,
            copies.told(),
            copies.first,
        )

    def _recorder(self, operation: str, step: int | None) -> EventRecorder:
        return EventRecorder(operation, step, self._engine.observers)


def _tells_of_damage(error: CheckpointError, storage: Storage) -> bool:
    if isinstance(error, StorageError):
        # A store says so of all that it has; a disk of one file.
        return error.errno == errno.EIO and not storage.keeps_others
    return isinstance(error, CorruptCheckpointError | DeviceMismatchError)


def check_one_step(step: int, fallback: bool, healthy: Healthy | None) -> int:
    """Return `step`, which was asked for by its number.

    Raises:
        InvalidArgumentError: Something else was asked for, too, that makes sense without one only.
    """
    for name, given, kind in (
        ("fallback=True", fallback, "whole"),
        ("healthy=...", healthy is not None, "healthy"),
    ):
        if given:
            raise InvalidArgumentError(
                f"restore({name}) takes the newest step that is {kind}: leave the step out",
                step=step,
            )
    return step


def rank(
    steps: Sequence[SavedStep], metric: Metric | None, mode: Mode | None, ranking: BestN | None
) -> int | None:
    """Return the step with the best metric; None without steps.

    Raises:
        InvalidArgumentError: It is not said which is the best, or no step has such a metric.
    """
    if metric is None:
        if ranking is None:
            raise InvalidArgumentError(
                "best_step(): the manager's preservation has no single BestN that defines the "
                "best step. Name a metric: best_step('loss', 'min')"
            )
        metric, mode = ranking.metric, mode or ranking.mode
    elif mode is None:
        raise InvalidArgumentError(
            f"best_step({shown(metric)}): say which values are better: mode='min' or 'max'"
        )
    best = best_of(steps, metric, mode)
    if best is None and steps:
        # The caller may take None for a fresh run, or restore the latest step.
        raise _no_metric(metric, steps)
    return best


def _no_metric(metric: Metric, steps: Sequence[SavedStep]) -> InvalidArgumentError:
    names = sorted({name for each in steps for name in each.metrics or ()})
    if callable(metric):
        return InvalidArgumentError(
            f"best_step(): the function gives no number for any of the {len(steps)} steps, whose "
            f"metrics are {', '.join(names) or 'none'}"
        )
    count = "the only step does not have" if len(steps) == 1 else f"none of {len(steps)} steps has"
    if metric in names:
        problem = f"{count} a number for this metric, only NaN"
    elif names:
        hint = suggestion(metric, names)
        problem = f"{count} this metric; there is {', '.join(map(repr, names))}{hint}"
    else:
        problem = f"{count} this metric, nor any other. Pass metrics={{...}} to save()"
    return InvalidArgumentError(f"best_step({shown(metric)}): {problem}")
