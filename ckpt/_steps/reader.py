"""`StepReader`: lists, restores and verifies the steps of one root."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt._arguments import check_step, shown
from ckpt._engine.engine import Engine, base_of_restored
from ckpt._events import EventRecorder
from ckpt._format.manifest import Manifest
from ckpt._format.manifest_head import Parent, is_same_save
from ckpt._redaction import redact
from ckpt._runtime.futures import CallingThread
from ckpt._runtime.threads import run_in_thread
from ckpt._steps.opened import OpenedStep, shortened
from ckpt._steps.restore_options import RestoredState, RunOrigin
from ckpt._steps.root import Root
from ckpt._steps.step_choice import RunStart, StepChoice, saved_step
from ckpt._tree.leaf_names import suggestion
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
from ckpt.keep._questions import Requirement, SavedStep
from ckpt.keep._ranking import Best, Metric, Mode, best_of, ranking_of
from ckpt.storage._base import HasDirectories, Storage
from ckpt.storage._manifests import refuse_deleted
from ckpt.storage._resolve import PathLike, open_step_dir

if TYPE_CHECKING:
    from ckpt._engine.restore.step_files import Elsewhere, OtherCopies
    from ckpt._engine.verify.report import VerifyReport
    from ckpt._steps.restore_options import RestoreOptions
    from ckpt._steps.step_metadata import StepMetadata

logger = logging.getLogger("ckpt")

# After so many tries a read fails: a writer that deletes the latest step so often keeps none that
# can be read.
_LATEST_TRIES = 20


class StepReader:
    """Reads the steps of one root. Its coroutines run on the engine's loop."""

    def __init__(self, root: Root, engine: Engine, origin: RunOrigin) -> None:
        """Read from `root`; each restore is noted in `origin`."""
        self._root = root
        self._storage = root.storage
        self._index = root.index
        self._engine = engine
        self._processes = root.processes
        self._origin = origin
        self.choice: StepChoice = StepChoice(root.storage, root.index, root.processes)
        # Attempts of the steps whose missing items a warning has named.
        self._said_missing: set[str] = set()

    async def all_steps(self) -> list[int]:
        """Return the committed steps, ascending."""
        return list(await self._processes.steps.refresh())

    async def latest_step(self, wanted: Requirement | None = None) -> int | None:
        """Return the latest committed step that is as required; None if there is none."""
        if wanted is not None:
            return (await self.choice.greatest(wanted))[0]
        latest = await self._processes.steps.latest()
        return None if latest is None else latest.step

    async def best_step(self, metric: Metric | None, mode: Mode | None) -> int | None:
        """Return the step with the best metric, or None; see the managers."""
        steps = list((await self.saved_steps()).values())
        keep = self._root.options.keep
        ranking = None if keep is None else ranking_of(keep)
        return await run_in_thread(rank, steps, metric, mode, ranking)

    async def saved_steps(self) -> dict[int, SavedStep]:
        """Return the committed steps in the form that policies take, ascending."""
        found = await self._processes.steps.refresh()
        return {step: saved_step(each) for step, each in found.items()}

    async def metadata(self, step: int | None) -> StepMetadata:
        """Return the metadata of `step`, or of the latest one."""
        from ckpt._steps.step_metadata import describe_step

        opened = await self._processes.steps.found(step)
        path = f"{self._storage.location}/{opened.step_dir}"
        return await run_in_thread(describe_step, opened.manifest, path)

    async def start_of_run(self, wanted: Requirement | None) -> RunStart:
        """Return how the run begins or goes on; see `StepChoice`."""
        return await self.choice.start_of_run(wanted)

    async def verify(
        self,
        step: int | None,
        deep: bool,
        sample: float | None = None,
        seed: int | None = None,
        timeout: float | None = None,
    ) -> VerifyReport:
        """Compare `step`, or the latest one, with its manifest; see `verify_step_dir`."""
        from ckpt._engine.verify.pipeline import verify_step_dir
        from ckpt._engine.verify.report import read_limits

        limits = read_limits(deep, sample, seed, timeout)
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
                        f"{self._storage.location}/{step_dirs[0]} was written by another library, "
                        "without digests: there is nothing to compare it with. A restore reads it",
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
                        may_write=not self._root.is_read_only,
                    )
                except StepNotFoundError as error:
                    deleted = error
                    now = None if step is None else await self._index.look(step_dirs[0])
                    # A step that has only lost items is still there.
                    if step is not None and not (now and looked and is_same_save(now, looked)):
                        raise
                    continue
                found = f"step {chosen}: {report.path} is damaged"
                self._engine.distrust((each.file for each in report.problems), found)
                self._recorder("verify", chosen).end(began, "ok", nbytes=report.nbytes)
                return report
            raise deleted

    async def begin_from(self, source: PathLike, options: RestoreOptions) -> Any:
        """Return the restored content of another run's checkpoint, from which this run begins."""
        from ckpt._engine.restore.pipeline import restore_items
        from ckpt._steps import restore_arguments as given
        from ckpt._steps.path_diagnosis import opened_checkpoint

        began = time.perf_counter()
        storage, step_dir = open_step_dir(source, follow=True)
        opened = await opened_checkpoint(source, storage, step_dir)
        where, manifest = redact(opened.location), opened.manifest
        try:
            process = self._processes.process, self._processes.count
            context = given.context_of(opened, self._engine, *process)
            loaded = await restore_items(context, given.wanted_items(manifest, options))
        except CheckpointError as error:
            # The step of the error is not one of this run.
            error.step, error.message = None, f"source {where}: {error.message}"
            raise
        # Credentials are redacted: this path is stored in the manifest.
        self._origin.begin_from(Parent(where, manifest.step, manifest.attempt), None, None)
        logger.info("a new run begins from %s: %s", where, given.volume_text(context, began))
        return given.result_of(context, options, loaded)

    async def resume(
        self, start: RunStart, options: RestoreOptions, caller: CallingThread
    ) -> tuple[int, Any]:
        """Restore the step of `start`; return the step after it, and the restored state."""
        step, found = await self._newest(options, caller, start)
        return check_step(step) + 1, found

    async def restore(
        self, step: int | None, options: RestoreOptions, caller: CallingThread
    ) -> Any:
        """Load a step, or the latest one; if that is deleted meanwhile, load the next one.

        Several processes load the same step, and all of them fail if one does. If they share the
        bytes they read, programs that `caller` runs exchange them.
        """
        if step is not None:
            return (await self.load(check_one_step(step, options), options, caller))[1]
        return (await self._newest(options, caller))[1]

    async def _newest(
        self, options: RestoreOptions, caller: CallingThread, start: RunStart | None = None
    ) -> tuple[int | None, Any]:
        """Load the newest step; a warning names each step that is passed over.

        Args:
            options: The options that say which steps are passed over.
            caller: See `restore`.
            start: The start of a run, which saves passed-over steps anew; None for a mere restore.
        """
        first: CorruptCheckpointError | ItemDroppedError | None = None
        tried: set[int] = set()
        gone = 0
        wanted = options.wanted
        choose = partial(self.choice.step_for_all, wanted, tried, goes_back=start is not None)
        # Do not list every step yet: it takes long in a large root, and is seldom needed.
        chosen, latest = (None, None) if start is None else (start.chosen, start.latest)
        if wanted is not None and chosen is None:
            chosen = await choose()
        while True:
            damage: str | None = None
            step = chosen
            try:
                return await self.load(chosen, options, caller, latest)
            except StepNotFoundError:
                # The step was deleted or replaced after the choice: choose again.
                gone += 1
                if chosen is None or gone == _LATEST_TRIES:
                    raise
            except (CorruptCheckpointError, ItemDroppedError) as error:
                step = error.step if chosen is None else chosen
                if step is None or not options.fallback:
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
        options: RestoreOptions,
        caller: CallingThread,
        latest: OpenedStep | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> tuple[int | None, Any]:
        """Load a step, or the latest one; return its number and the result.

        Damaged parts are read from the copies that `elsewhere` finds.
        """
        from ckpt._engine.restore.pipeline import restore_items
        from ckpt._engine.restore.step_files import OtherCopies
        from ckpt._steps import restore_arguments as given

        began, began_ns = time.perf_counter(), time.perf_counter_ns()
        engine, processes = self._engine, self._processes
        with self._recorder("restore", step).failing(began_ns):
            known: Manifest | None = None
            deleted: StepDeletedError | None = None
            for _ in range(_LATEST_TRIES):
                is_another = False
                # `latest` was found a moment ago; if it is gone, the next try looks for another.
                known_latest = latest if step is None and deleted is None else None
                try:
                    async with processes.restoring(
                        step, known_latest, options.broadcast_bytes, caller, elsewhere
                    ) as found:
                        opened = found.opened
                        manifest = opened.manifest
                        # A step that has lost items meanwhile is still the step that was asked for.
                        if step is not None and deleted is not None and known is not None:
                            is_another = not is_same_save(manifest, known)
                            if is_another:
                                raise deleted
                        known = manifest
                        for hooks in self._root.hooks:
                            await hooks.before_restore(self._root, manifest)
                        copies, is_own = None, opened.foreign is None
                        if found.elsewhere is not None and is_own:
                            copies = OtherCopies(partial(found.elsewhere, manifest))
                        job = processes.process, processes.count, processes.observers
                        how = found.broadcast, options, copies
                        context = given.context_of(opened, engine, *job, *how)
                        loaded = await restore_items(context, given.wanted_items(manifest, options))
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
                    # In a job, this also handles errors that another process has found.
                    if known is not None and _tells_of_damage(error, self._storage):
                        self.distrust(known)
                    raise
                state = None
                is_as_saved = options.at is None and options.adapt is None
                if is_as_saved and loaded.keys() == manifest.items.keys():
                    state = RestoredState.of(manifest.attempt, loaded, is_foreign=not is_own)
                self._origin.begin_from(manifest.parent, manifest.step, state)
                base = engine.base_step
                if not self._root.is_read_only and (base is None or base.was_restored):
                    engine.base_step = base_of_restored(self._storage, opened.step_dir, manifest)
                if copies is not None and copies.first is not None:
                    self.distrust(manifest)
                    await self._say_elsewhere(opened.step_dir, manifest, copies)
                nbytes = sum(context.moved)
                self._recorder("restore", manifest.step).end(began_ns, "ok", nbytes=nbytes)
                where, volume = redact(self._storage.location), given.volume_text(context, began)
                logger.info("restored step %s of %s: %s", manifest.step, where, volume)
                for hooks in self._root.hooks:
                    await hooks.restored(self._root, manifest)
                if options.are_for_everything:
                    self._say_missing(manifest, given.what_is_missing(manifest))
                return manifest.step, given.result_of(context, options, loaded)
            assert deleted is not None
            raise deleted

    def distrust(self, manifest: Manifest) -> None:
        """Keep saves from reusing any data file of a damaged step."""
        files = (f"{name}/{path}" for name, it in manifest.items.items() for path in it.data_files)
        where = redact(self._storage.location)
        self._engine.distrust(files, f"step {manifest.step} of {where} is damaged")

    async def _with_steps(self, error: ItemDroppedError) -> ItemDroppedError:
        """Return the error of a dropped item, extended by the steps that still have it."""
        found = await self._index.refresh()
        steps = [step for step, each in found.items() if error.item in each.items]
        left = f"steps that still have it: {shortened(steps)}" if steps else "no step has it now"
        return ItemDroppedError(f"{error.message}; {left}", step=error.step, item=error.item)

    def _say_missing(self, manifest: Manifest, missing: str) -> None:
        """Warn once about the items that a restored whole step no longer has."""
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
        # EIO from an object store is about the whole store; from a disk, about one file.
        return error.errno == errno.EIO and isinstance(storage, HasDirectories)
    return isinstance(error, CorruptCheckpointError | DeviceMismatchError)


def check_one_step(step: object, options: RestoreOptions) -> int:
    """Return `step`, which was asked for by its number, as an int.

    Raises:
        InvalidArgumentError: An option was given, too, that makes sense only without a step.
    """
    number, wanted = check_step(step), options.wanted
    given = ("fallback=True", "whole") if options.fallback else None
    if given is None and wanted is not None:
        given = f"{wanted.name}=...", wanted.name
    if given is not None:
        name, kind = given
        raise InvalidArgumentError(
            f"restore({name}) takes the newest step that is {kind}: leave the step out",
            step=number,
        )
    return number


def rank(
    steps: Sequence[SavedStep], metric: Metric | None, mode: Mode | None, ranking: Best | None
) -> int | None:
    """Return the step with the best metric; None if there are no steps, or none has metrics.

    Raises:
        InvalidArgumentError: Nothing defines the best step, or no step has the metric.
    """
    if metric is None:
        if not any(each.metrics for each in steps):
            return None
        if ranking is None:
            raise InvalidArgumentError(
                "best_step(): keep= of the manager has no single Best that defines the "
                "best step. Name a metric: best_step('loss', 'min')"
            )
        metric, mode = ranking.metric, mode or ranking.mode
    elif mode is None:
        raise InvalidArgumentError(
            f"best_step({shown(metric)}): say which values are better: mode='min' or 'max'"
        )
    best = best_of(steps, metric, mode)
    if best is None and steps:
        # None would be wrong: the caller may take it for a fresh run, or restore the latest step.
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
