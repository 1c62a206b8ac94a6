"""The steps of one root, read: which there are, what they are, and what they hold."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, get_args

from ckpt._arguments import check_step, one_of, shown, true_or_false
from ckpt._engine.engine import Engine
from ckpt._engine.last_save import restored
from ckpt._engine.restore.pipeline import restore_items
from ckpt._engine.verify.file_selection import read_limits
from ckpt._engine.verify.pipeline import verify_step_dir
from ckpt._engine.verify.report import VerifyReport
from ckpt._events import EventRecorder
from ckpt._format.history import Parent, is_rest_of
from ckpt._format.manifest import Manifest
from ckpt._plan.adapt import Adapt
from ckpt._redaction import redact
from ckpt._runtime.futures import CallingThread
from ckpt._runtime.threads import run_in_thread
from ckpt._settings import ArrayMemory, VerifyMode, checks_devices
from ckpt._steps.index import IndexedStep, PassedOver, StepIndex
from ckpt._steps.opened import open_step
from ckpt._steps.previous_steps import AilingLeaves, saved_step
from ckpt._steps.processes import Processes
from ckpt._steps.restore_requests import context_of, result_of, wanted_items, what_is_missing
from ckpt._steps.step_metadata import StepMetadata, describe_step
from ckpt._steps.unreadable import shortened
from ckpt._steps.wrong_paths import explained
from ckpt._tree.suggestions import suggestion
from ckpt._tree.table import size_text
from ckpt.errors import (
    CorruptCheckpointError,
    InvalidArgumentError,
    ItemDroppedError,
    NotACheckpointError,
    StepDeletedError,
    StepNotFoundError,
)
from ckpt.policies._context import SavedStep
from ckpt.policies._health import Healthy, check_healthy, why_not_healthy
from ckpt.policies._ranking import BestN, Metric, Mode, best_of
from ckpt.storage._base import Storage
from ckpt.storage._manifests import no_manifest, while_read
from ckpt.storage._resolve import PathLike, open_step_dir

logger = logging.getLogger("ckpt")

# A writer that deletes the latest step this often while it is read keeps nothing that one can read.
_LATEST_TRIES = 20

# Of many steps that are passed over, the reasons of the newest ones are told.
_MOST_TOLD = 5

_Load = Callable[[int | None], Awaitable[tuple[int | None, Any]]]


class StepReader:
    """Reads the steps of one root. Its coroutines run on the engine's loop."""

    def __init__(
        self,
        storage: Storage,
        index: StepIndex,
        engine: Engine,
        ranking: BestN | None,
        processes: Processes,
        begins_from: Callable[[Parent], None],
        *,
        may_write: bool,
    ) -> None:
        """Read from `storage`, together with the other processes of the job.

        `ranking` says which step is the best where a call does not. `begins_from` is told of the
        checkpoint that the run has begun from.
        """
        self._storage = storage
        self._index = index
        self._engine = engine
        self.ranking = ranking
        self._processes = processes
        self.begins_from = begins_from
        self._may_write = may_write
        self._ailing = AilingLeaves(storage)
        # What was said of steps that were passed over.
        self._said_passed: set[tuple[int, PassedOver]] = set()
        # The attempts of steps of which it was said which items they lack.
        self._said_missing: set[str] = set()

    async def all_steps(self) -> list[int]:
        """Return every committed step, ascending."""
        return list(await self._processes.steps.refresh())

    async def latest_step(self, healthy: bool | Healthy = False) -> int | None:
        """Return the greatest committed step, or the greatest healthy one; None without any."""
        wanted = check_healthy(healthy)
        if wanted is not None:
            return (await self._healthy_step(wanted))[0]
        latest = await self._processes.steps.latest()
        return None if latest is None else latest.step

    async def _healthy_step(
        self, wanted: Healthy, tried: Collection[int] = ()
    ) -> tuple[int | None, dict[int, PassedOver]]:
        """Return the greatest healthy step that was not tried, and the newer ones, with reasons.

        Without a healthy step that is None, and all. Steps that are passed over are named once.
        """
        reasons = await self.judged(wanted)
        healthy = (step for step, why in reasons.items() if why is None and step not in tried)
        chosen = max(healthy, default=None)
        passed = {
            step: why
            for step, why in reasons.items()
            if why is not None and (chosen is None or step > chosen)
        }
        if chosen is not None:
            self.say_passed(chosen, passed)
        return chosen, passed

    async def judged(self, wanted: Healthy) -> dict[int, PassedOver | None]:
        """Return for each committed step why it is not known to be healthy; None if it is."""
        attempts: dict[int, str] = {}

        async def see(found: Mapping[int, IndexedStep]) -> list[SavedStep]:
            attempts.update({step: each.attempt for step, each in found.items()})
            return await self._ailing.saved_steps(found.values())

        reasons = await self._processes.judged(see, partial(why_not_healthy, allow=wanted.allow))
        return {
            step: PassedOver(attempts[step], why, "unhealthy") if why else None
            for step, why in reasons.items()
        }

    def say_passed(self, chosen: int, passed: Mapping[int, PassedOver]) -> None:
        """Name the steps that are passed over because they are not healthy, once."""
        if passed and not self._said_passed.issuperset(passed.items()):
            self._said_passed = set(passed.items())
            logger.warning(
                "%s: step %d is the newest healthy one; newer steps are passed over: %s",
                redact(self._storage.location),
                chosen,
                _told(passed),
            )

    def pass_over_all(self, passed: Mapping[int, PassedOver]) -> None:
        """Let saves replace these steps."""
        self._index.passed_over |= passed

    async def choose_healthy(
        self, wanted: Healthy, tried: Collection[int], *, goes_back: bool
    ) -> int:
        """Return the greatest healthy step that was not tried, for all processes.

        If the run `goes_back` to it, saves of the newer ones replace those.

        Raises:
            StepNotFoundError: There is none; says what is wrong with those that there are.
        """

        async def act() -> int:
            chosen, passed = await self._healthy_step(wanted, tried)
            if chosen is None:
                raise self._none_healthy(passed) if passed else self._index.no_step()
            if goes_back:
                # When the run comes to them again, they have to make way.
                self._index.passed_over |= passed
            return chosen

        what = "which step is the newest healthy one"
        return check_step(await self._processes.decided("healthy", what, act))

    def _none_healthy(self, passed: Mapping[int, PassedOver]) -> StepNotFoundError:
        count = (
            "its only step is not" if len(passed) == 1 else f"none of its {len(passed)} steps is"
        )
        return StepNotFoundError(
            f"{self._storage.location}: {count} known to be healthy: {_told(passed)}. Restore one "
            "of them by its number, leave out healthy=, or allow leaves whose values are meant "
            "with healthy=ckpt.policies.Healthy(allow=[...])"
        )

    async def best_step(self, metric: Metric | None, mode: Mode | None) -> int | None:
        """Return the step with the best metric, or None; see the managers."""
        steps = list((await self.saved_steps()).values())
        return await run_in_thread(rank, steps, metric, mode, self.ranking)

    async def saved_steps(self) -> dict[int, SavedStep]:
        """Return the committed steps as policies see them, ascending."""
        found = await self._processes.steps.refresh()
        return {step: saved_step(each) for step, each in found.items()}

    async def pass_over(self, step: int, reason: str) -> None:
        """Let a save replace a step that is damaged, in all processes; nothing, if it is gone."""
        found = await self._processes.steps.refresh()
        if step in found:
            self._index.passed_over[step] = PassedOver(found[step].attempt, reason)

    async def metadata(self, step: int | None) -> StepMetadata:
        """Return the metadata of `step`, or of the latest one."""
        opened = await self._processes.steps.found(step)
        path = f"{self._storage.location}/{opened.step_dir}"
        return await run_in_thread(describe_step, opened.manifest, path)

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
                self._recorder("verify", chosen).end(began, "ok", nbytes=report.nbytes)
                return report
            raise deleted

    async def _lost_items(self, step_dir: str, known: IndexedStep | None) -> bool:
        """Tell whether a step is still there, and only items were taken out of it."""
        found = await self._index.look(step_dir)
        return found is not None and known is not None and is_rest_of(found, known)

    async def is_fresh(self, healthy: bool | Healthy) -> bool:
        """Tell whether a run begins here, in all processes alike: the root has no steps.

        Raises:
            InvalidArgumentError: `healthy` is not what `resume` takes; in a new run, too.
            StepNotFoundError: It has some, and none of them can be read.
        """
        check_healthy(healthy)
        what = "whether the run begins here"
        return bool(await self._processes.decided("begins", what, self._has_no_steps))

    async def _has_no_steps(self) -> bool:
        if await self.latest_step() is not None:
            return False
        if self._index.unreadable:
            error = self._index.no_step()
            raise StepNotFoundError(
                f"{error.message}. To begin a new run, choose another root, or remove what is there"
            )
        return True

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
        where = f"{storage.location}/{step_dir}"
        opened = await open_step(storage, step_dir)
        if opened is None:
            raise await explained(source, no_manifest(where))
        processes, manifest = self._processes, opened.manifest
        like, items = (None, target) if named else (target, None)
        async with while_read(storage, step_dir, manifest):
            context = context_of(opened, storage, self._engine, processes.process, processes.count)
            loaded = await restore_items(context, wanted_items(manifest, like, items, adapt))
        # What is written down for others must not hold what opens the store.
        self.begins_from(Parent(redact(where), manifest.step, manifest.attempt))
        logger.info(
            "a new run begins from %s: %s in %.2f s",
            redact(where),
            size_text(sum(context.moved)),
            time.perf_counter() - began,
        )
        return result_of(manifest, loaded, named=named)

    async def resume(
        self,
        target: Any,
        named: bool,
        adapt: Adapt | Mapping[str, Adapt] | None,
        fallback: bool,
        healthy: bool | Healthy,
        caller: CallingThread,
    ) -> tuple[int, Any]:
        """Return the step after the latest one, and what that one holds; see the managers."""
        true_or_false("fallback", fallback)
        load = partial(
            self.load,
            like=None if named else target,
            items=target if named else None,
            at=None,
            adapt=adapt,
            broadcast_bytes=None,
            caller=caller,
        )
        wanted = check_healthy(healthy)
        step, found = await self._newest(load, fallback, wanted, goes_back=True)
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
        self, load: _Load, fallback: bool, wanted: Healthy | None, *, goes_back: bool = False
    ) -> tuple[int | None, Any]:
        """Load the newest step; each one that is passed over is named in a warning.

        Args:
            load: Loads a step; None is the latest.
            fallback: Pass over steps that are damaged, or lack an item that is wanted.
            wanted: Pass over those that are not healthy by it.
            goes_back: Whether the run goes on from there, and saves those anew.
        """
        first: CorruptCheckpointError | ItemDroppedError | None = None
        tried: set[int] = set()
        gone = 0
        # Listing every step takes long in a large root, and is seldom needed.
        choose = partial(self.choose_healthy, goes_back=goes_back)
        chosen = None if wanted is None else await choose(wanted, tried)
        while True:
            damage: CorruptCheckpointError | None = None
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
                damage = error if isinstance(error, CorruptCheckpointError) else None
                first = first or error
                tried.add(step)
                logger.warning("step %d is passed over for the one before it: %s", step, error)
            assert step is not None
            # All processes have to try the same one, and hear of the damage that one has found.
            found = await self._processes.steps.refresh()
            if damage is not None and step in found:
                self._index.passed_over[step] = PassedOver(found[step].attempt, damage.message)
            if wanted is None:
                chosen = max((each for each in found if each not in tried), default=None)
            else:
                try:
                    chosen = await choose(wanted, tried)
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
    ) -> tuple[int | None, Any]:
        """Load a step, or the latest one; return it with what it holds."""
        began = time.perf_counter_ns()
        engine, processes = self._engine, self._processes
        with self._recorder("restore", step).failing(began):
            known: Manifest | None = None
            deleted: StepDeletedError | None = None
            for _ in range(_LATEST_TRIES):
                is_another = False
                try:
                    async with processes.restoring(step, broadcast_bytes, caller) as found:
                        opened = found.opened
                        manifest = opened.manifest
                        # One that has lost items meanwhile is still the step that was asked for.
                        if step is not None and deleted is not None and known is not None:
                            is_another = not is_rest_of(manifest, known)
                            if is_another:
                                raise deleted
                        known = manifest
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
                nbytes = sum(context.moved)
                if manifest.parent is not None:
                    self.begins_from(manifest.parent)
                if self._may_write and (engine.last_save is None or engine.last_save.was_restored):
                    engine.last_save = restored(self._storage, opened.step_dir, manifest)
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

    def _recorder(self, operation: str, step: int | None) -> EventRecorder:
        return EventRecorder(operation, step, self._engine.observers)


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


def _told(passed: Mapping[int, PassedOver]) -> str:
    """Return the reasons why steps are passed over, those of the newest first."""
    told = [f"step {step}: {passed[step].reason}" for step in sorted(passed, reverse=True)]
    more = len(told) - _MOST_TOLD
    return " | ".join(told[:_MOST_TOLD]) + (f" | and {more} more" if more > 0 else "")


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
