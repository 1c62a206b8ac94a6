"""Deletion of steps: off the save path, and never of pinned steps or other people's files."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import anyio

from ckpt._arguments import check_step, shown
from ckpt._events import EventRecorder, Observer
from ckpt._format.manifest_head import FILE_NAME, MAX_BYTES, left_behind, peek_files
from ckpt._redaction import redact
from ckpt._runtime.threads import run_in_thread
from ckpt._steps.index import IndexedStep, StepIndex
from ckpt._steps.opened import OpenedStep, open_step, shortened
from ckpt._steps.pins import deletion_of, pins, refuse_pinned
from ckpt._steps.removal.deletion_plan import DeletionPlan, keeps_all, plan_deletions
from ckpt._steps.step_choice import NamedNotes, saved_step
from ckpt._tree.leaf_names import near_miss
from ckpt.errors import (
    CorruptCheckpointError,
    InvalidArgumentError,
    StepDeletedError,
    StepNotFoundError,
    StepPinnedError,
    StorageError,
    located,
)
from ckpt.keep._deletion import Deletion, trash_of
from ckpt.keep._health import last_resorts
from ckpt.keep._keep_policies import All, KeepRules
from ckpt.keep._questions import SavedStep
from ckpt.keep._ranking import Metric, rankings_in, value_of
from ckpt.storage._base import HasDirectories, Storage
from ckpt.storage._manifests import while_read

if TYPE_CHECKING:
    from ckpt._engine.plan_cache import Sidecars
    from ckpt._steps.run_hooks import RunHooks

logger = logging.getLogger("ckpt")

_NAMED_FILES = 5
# How steps are deleted by default.
_FOR_GOOD = Deletion()


async def is_ours(storage: Storage, step_dir: str) -> bool:
    """Return True if the step directory has a manifest, damaged or not."""
    try:
        return await storage.read(step_dir, FILE_NAME, MAX_BYTES) is not None
    except CorruptCheckpointError:
        return True


async def spare_foreign_files(storage: Storage, step_dir: str) -> None:
    """Move files that the library did not write out of a directory that will be removed.

    Does nothing if the manifest is damaged, since it lists the files of the library; if another
    writer replaces or removes the step directory at the same time; or if the store removes only
    files that the library wrote.
    """
    if not isinstance(storage, HasDirectories):
        return
    try:
        data = await storage.read(step_dir, FILE_NAME, MAX_BYTES)
        known = None if data is None else await run_in_thread(peek_files, data)
        if known is None:
            return
        others = sorted((await storage.files(step_dir)).keys() - known)
        # Another step may have taken the place of this one before the files were listed.
        if not others or await storage.read(step_dir, FILE_NAME, MAX_BYTES) != data:
            return
    except CorruptCheckpointError:
        return
    except StorageError:
        if await storage.exists(step_dir):
            raise
        return
    folder = await storage.set_aside(step_dir, others)
    logger.warning(
        "%d files in %s/%s were not written by this library; they are in %s now: %s",
        len(others),
        storage.location,
        step_dir,
        folder,
        ", ".join(others[:_NAMED_FILES]),
    )


class Retention:
    """Deletes steps of one root. Its coroutines run on the engine's loop."""

    def __init__(
        self,
        storage: Storage,
        index: StepIndex,
        policy: KeepRules | None,
        deletion: Deletion | None,
        sidecars: Sidecars,
        observers: tuple[Observer, ...] = (),
        now_ns: Callable[[], int] = time.time_ns,
        hooks: Sequence[RunHooks] = (),
        log_level: int = logging.INFO,
    ) -> None:
        """Keep the steps of `storage` that `policy` keeps.

        Args:
            storage: The root.
            index: The committed steps of the root.
            policy: The keep policy; None (not given) keeps all.
            deletion: How the other steps are deleted; None (not given) removes them permanently.
            sidecars: The files for other readers of steps that lose an item.
            observers: Observers of every deletion.
            now_ns: Returns the time in Unix nanoseconds.
            hooks: Features that protect steps.
            log_level: Level of the line about each deletion.
        """
        self._storage = storage
        self._index = index
        self._told = (policy, deletion)
        self._policy = All() if policy is None else policy
        how = _FOR_GOOD if deletion is None else deletion
        self._concurrency = how.concurrency
        self._keeps_latest = how.keep_latest
        self._spares_foreign = not how.orbax_steps
        self._said_spared = False
        # True if `preserve` deletes nothing.
        self.keeps_all: bool = keeps_all(self._policy)
        has_own = False
        if self._told != (None, None):
            # Imported now: after a save, the program may be ending.
            from ckpt._steps.removal.recorded_policy import is_own

            has_own = is_own(self._policy)
        self._notes = NamedNotes(storage, with_metadata=has_own)
        # Steps that a warning has named as the last ones to go back to.
        self._said_last: set[int] = set()
        self._said_unused: set[str] = set()
        self._said_unranked: set[Metric] = set()
        self.trash: str | None = None if deletion is None else trash_of(deletion)
        self._observers = observers
        self._now_ns = now_ns
        self._sidecars = sidecars
        # The step that was acknowledged last, or None; set by the saves.
        self.newest: int | None = None
        self._hooks = hooks
        self._log_level = log_level
        # Set on the engine's loop. Held during the deletions after a commit: the deletions of
        # several commits then stay within the wanted concurrency, and no step is deleted twice.
        self._preserving: anyio.Lock | None = None

    async def prepare(self) -> None:
        """Create the trash folder if there is one.

        Raises:
            StorageError: Steps could not be moved into it.
        """
        if self.trash is not None and isinstance(self._storage, HasDirectories):
            await self._storage.prepare_trash(self.trash)

    async def write_down(self) -> None:
        """Record the policy in the root, for people and tools that look at it."""
        if self._told != (None, None):
            from ckpt._steps.removal.recorded_policy import record_policy

            await record_policy(self._storage, *self._told)

    def would_delete(self, found: Mapping[int, IndexedStep]) -> frozenset[int]:
        """Return the steps that would be deleted if `found` were the steps of the root."""
        if self.keeps_all:
            return frozenset()
        behind = left_behind(found.values())
        steps = [saved_step(each, behind) for each in found.values()]
        now = self._now_ns() / 1e9
        always = self._latest(found)
        return frozenset(plan_deletions(self._policy, found, steps, now, always).steps)

    def _latest(self, found: Mapping[int, IndexedStep]) -> set[int | None]:
        """Return the greatest step and the one to resume from, if these always stay."""
        if not self._keeps_latest:
            return set()
        behind = left_behind(found.values())
        branch = (step for step, each in found.items() if each.created_ns not in behind)
        return {max(found, default=None), max(branch, default=None)}

    async def preserve(self, going: DeletionPlan | None = None) -> None:
        """Delete the steps and items that the policy does not keep, several at a time.

        Args:
            going: Result of `deletion_plan`; None makes the plan. A step that was replaced since is
                left as it is.

        Raises:
            CheckpointError: Some steps could not be deleted; all others were.
        """
        if self.keeps_all:
            return
        self._preserving = self._preserving or anyio.Lock()
        async with self._preserving:
            if going is None:
                going = await self.deletion_plan(await self._index.refresh())
            await self._delete_all(going)

    async def deletion_plan(
        self,
        found: Mapping[int, IndexedStep],
        steps: Sequence[SavedStep] | None = None,
        *,
        says_spared: bool = True,
    ) -> DeletionPlan:
        """Return the unpinned steps and items that the policy does not keep.

        The step that was acknowledged last stays, even if older steps have greater numbers: after a
        run went back, it would resume from its new steps. The last step to go back to stays, too.

        Args:
            found: The steps.
            steps: Result of `saved_steps` for the same steps; None reads them.
            says_spared: True to warn about Orbax steps that stay, about the last step to go back
                to, and about a step without the metric that ranks it.
        """
        steps = await self.saved_steps(found) if steps is None else steps
        if says_spared:
            # Run in a thread, since the metric may be a function of the user's.
            await run_in_thread(self._say_unranked, steps)
        # A step that cannot be read now stays: missing knowledge is no reason to delete it.
        always: set[int | None] = {self.newest, *self._notes.unread, *self._latest(found)}
        for each in self._hooks:
            always.update(each.protected())
        now = self._now_ns() / 1e9
        going = await run_in_thread(plan_deletions, self._policy, found, steps, now, always)
        by_item = isinstance(self._policy, Mapping)
        if by_item or self._spares_foreign:
            among = found if by_item else going.steps
            spared = [step for step in among if found[step].is_foreign]
            going = going.where(lambda step: step not in spared)
            if says_spared:
                self._say_spared(spared)
                self._say_unused(found)
        pinned = await pins(self._storage) if going else {}
        going = going.where(lambda step: step not in pinned)
        whole = {each for each in found if each not in going.steps and each not in going.items}
        for step, why in last_resorts(self._policy, steps, whole, self.newest).items():
            whole.add(step)
            if says_spared:
                self._say_last(step, why)
        return going.where(lambda step: step not in whole)

    async def saved_steps(self, found: Mapping[int, IndexedStep]) -> list[SavedStep]:
        """Return steps in the form that the policy takes."""
        return await self._notes.saved_steps(found.values())

    def _say_last(self, step: int, why: str) -> None:
        """Warn once that a step stays because it is the last one to go back to."""
        if step not in self._said_last:
            self._said_last.add(step)
            where, text = redact(self._storage.location), "though the keep policy does not keep it"
            logger.warning("%s: step %d stays whole, %s: %s", where, step, text, why)

    def _say_spared(self, steps: Sequence[int]) -> None:
        """Warn once that steps of other libraries stay though the policy does not keep them."""
        if not steps or self._said_spared:
            return
        self._said_spared = True
        how = ", though the keep policy does not keep them"
        advice = "With Deletion(orbax_steps=True) they are deleted, too"
        if isinstance(self._policy, Mapping):
            how = " whole, since a keep policy for each item is about steps of this library"
            advice = "delete(step) deletes one"
        where, listed = redact(self._storage.location), shortened(sorted(steps))
        logger.warning(
            "%s: steps that another library wrote stay%s: %s. %s", where, how, listed, advice
        )

    def _say_unranked(self, steps: Sequence[SavedStep]) -> None:
        """Warn once for each metric that the step saved last does not have."""
        last = next((each for each in steps if each.step == self.newest), None)
        for ranking in rankings_in(self._policy):
            metric = ranking.metric
            if last is None or metric in self._said_unranked or value_of(last, metric) is not None:
                continue
            self._said_unranked.add(metric)
            names = sorted(last.metrics or ())
            hint = near_miss(metric, names) if isinstance(metric, str) else ""
            logger.warning(
                "%s: Best(%r) has no value for step %d, %s%s. Steps without a value %s",
                redact(self._storage.location),
                metric,
                last.step,
                f"whose metrics are {', '.join(map(repr, names))}" if names else "without metrics",
                hint,
                "are all kept" if ranking.keep_without_metrics else "rank last",
            )

    def _say_unused(self, found: Mapping[int, IndexedStep]) -> None:
        """Warn once for each pattern of the policy that matches no item of any step."""
        if not isinstance(self._policy, Mapping):
            return
        from ckpt.keep._by_item import unused_patterns

        known = {
            name
            for each in found.values()
            for name in (*each.items, *(gone.item for gone in each.dropped))
        }
        for pattern in unused_patterns(self._policy, known):
            if pattern not in self._said_unused:
                self._said_unused.add(pattern)
                logger.warning(
                    "%s: the keep policy of the items %r keeps nothing: the steps have "
                    "the items %s",
                    redact(self._storage.location),
                    pattern,
                    ", ".join(sorted(known)) or "none",
                )

    async def _delete_all(self, going: DeletionPlan) -> None:
        limiter = anyio.CapacityLimiter(self._concurrency)
        losing = going.losing()
        errors: list[Exception] = []

        async def delete(step: int) -> None:
            async with limiter:
                try:
                    with located(step=step):
                        if step in losing:
                            await self._drop(going.found[step], losing[step])
                            return
                        attempt = going.steps[step].attempt
                        await self._delete(step, await self._listed(step, attempt))
                except StepPinnedError:
                    logger.debug("step %d is kept: it was pinned just now", step)
                except Exception as error:
                    # The other steps are deleted all the same.
                    errors.append(error)

        async with anyio.create_task_group() as tasks:
            for step in sorted({*going.steps, *losing}):
                tasks.start_soon(delete, step)
        if errors:
            with located():
                raise ExceptionGroup("steps could not be deleted", errors)

    async def _listed(self, step: int, attempt: str) -> dict[str, str | None]:
        """Return the directories of a step, or none if it has changed since it was listed.

        Each directory comes with the attempt that it must still have when it is deleted. The
        directory that counts as the step is the last, so that no other directory becomes the step
        in between.
        """
        step_dirs = await self._index.step_dirs_of(step)
        looked = {step_dir: await self._index.look(step_dir) for step_dir in reversed(step_dirs)}
        chosen = looked[step_dirs[0]] if step_dirs else None
        if chosen is None or chosen.attempt != attempt:
            return {}
        # A step of Orbax has no manifest to compare.
        return {
            step_dir: None if each is None or each.is_foreign else each.attempt
            for step_dir, each in looked.items()
            if each is not None or await is_ours(self._storage, step_dir)
        }

    async def delete(self, step: int) -> None:
        """Delete a step, even a damaged one.

        Raises:
            StepNotFoundError: There is no such step.
            StepPinnedError: The step is pinned.
        """
        with EventRecorder("delete", step, self._observers).failing(time.perf_counter_ns()):
            step_dirs = await self._deletable(step)
        await self._delete(step, dict.fromkeys(reversed(step_dirs)))

    async def refuse_missing(self, step: int) -> None:
        """Raise if `delete` would find nothing to delete; pins are not checked.

        Raises:
            StepNotFoundError: There is no such step.
        """
        await self._deletable(step)

    async def _deletable(self, step: int) -> list[str]:
        """Return the step directories of a step that is to be deleted."""
        step_dirs = await self._index.step_dirs_of(step)
        if not step_dirs:
            raise await self._index.not_found(step)
        # `step_dirs()` lists directories only; a file or link of that name is not a step.
        listed = set(await self._storage.step_dirs())
        if listed.isdisjoint(step_dirs):
            raise StepNotFoundError(
                f"{self._storage.location}/{step_dirs[0]} is a file or a link, not a step",
                step=step,
            )
        found = [each for each in step_dirs if each in listed and await self._is_step(each)]
        if not found:
            raise StepNotFoundError(
                f"{self._storage.location}/{step_dirs[0]} is not a checkpoint of this library, so "
                "it is not deleted",
                step=step,
            )
        return found

    async def _is_step(self, step_dir: str) -> bool:
        """Return True if a directory is a step of this library, damaged or not, or of Orbax."""
        return (
            await is_ours(self._storage, step_dir) or await self._index.look(step_dir) is not None
        )

    async def _drop(self, found: IndexedStep, going: Mapping[str, str]) -> None:
        """Take items out of a step, unless it was replaced since it was listed."""
        opened = await open_step(self._storage, found.step_dir, found.step)
        if opened is None or opened.manifest.attempt != found.attempt:
            return
        try:
            await self.delete_items(opened, going)
        except StepDeletedError as error:
            logger.debug("no item of step %d is dropped: %s", found.step, error)

    async def delete_items(self, opened: OpenedStep, going: Mapping[str, str | None]) -> None:
        """Take items out of a step; each item comes with the policy that does not keep it, or None.

        Raises:
            InvalidArgumentError: There is no such item, or it is the only one.
            StepPinnedError: The step is pinned.
            StepDeletedError: The step was deleted or replaced at the same time.
        """
        # Imported here: writing manifests needs numpy and jax, and deleting steps does not.
        from ckpt._engine.save.republication import delete_items

        step_dir, manifest = opened.step_dir, opened.manifest
        step = check_step(manifest.step)
        if opened.foreign is not None:
            raise InvalidArgumentError(
                f"delete(item={shown(next(iter(going)))}): Orbax wrote this step, so it can only "
                "be deleted as a whole",
                step=step,
            )
        async with self._deletion(step):
            async with while_read(self._storage, step_dir, manifest):
                await spare_foreign_files(self._storage, step_dir)
            await delete_items(
                self._storage, step_dir, manifest, going, self._now_ns(), self._sidecars
            )
        for item, policy in going.items():
            why = "" if policy is None else f", which {policy} does not keep"
            logger.info("deleted the item %r of step %d%s", item, step, why)

    async def _delete(self, step: int, step_dirs: Mapping[str, str | None]) -> None:
        """Delete directories of a step, each only if it still has its given attempt."""
        if not step_dirs:
            return
        began = time.perf_counter()
        trash, is_gone = None, False
        async with self._deletion(step):
            for step_dir, attempt in step_dirs.items():
                await spare_foreign_files(self._storage, step_dir)
                if self.trash is not None:
                    trash = await self._storage.move(step_dir, self.trash)
                    is_gone = trash is not None
                else:
                    is_gone = await self._storage.remove(step_dir, attempt=attempt)
        if is_gone:
            where = "deleted" if trash is None else f"moved to {trash}:"
            seconds = time.perf_counter() - began
            logger.log(self._log_level, "%s step %d in %.2f s", where, step, seconds)

    @contextlib.asynccontextmanager
    async def _deletion(self, step: int) -> AsyncIterator[None]:
        """Keep readers from pinning a step while the body deletes it; report the outcome.

        Raises:
            StepPinnedError: The step is pinned already.
        """
        recorder = EventRecorder("delete", step, self._observers)
        with recorder.ending(time.perf_counter_ns(), skips=StepPinnedError):
            async with deletion_of(self._storage, step) as pinned:
                refuse_pinned(self._storage, step, pinned)
                yield
