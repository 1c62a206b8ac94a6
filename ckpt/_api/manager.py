"""`CheckpointManager`, for asyncio and trio programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, SupportsIndex, overload

import anyio

from ckpt._api.base import ManagerBase
from ckpt._api.coroutines import awaited_methods, refused
from ckpt._api.partial import PartialSave
from ckpt._api.resumption import Fresh, State, fresh_state, resume_target, source_target
from ckpt._api.trash import Trash
from ckpt._api.watch import Watch
from ckpt._arguments import true_or_false
from ckpt._commit import Commit, StepInfo
from ckpt._engine.verify.report import VerifyReport
from ckpt._plan.adapt import Adapt
from ckpt._runtime.futures import settled
from ckpt._runtime.threads import run_in_thread
from ckpt._runtime.tracebacks import outcome
from ckpt._settings import ArrayMemory, VerifyMode
from ckpt._steps.pins import Pin
from ckpt._steps.step_metadata import StepMetadata
from ckpt._steps.watcher import Until, WatchOptions
from ckpt.policies._health import Healthy
from ckpt.policies._ranking import Metric, Mode
from ckpt.storage._resolve import PathLike


@awaited_methods("mgr", "ckpt.sync.CheckpointManager")
class CheckpointManager(ManagerBase):
    """Saves and restores the steps of one directory while training continues.

    Use it as `async with`: leaving the block waits for every commit, and raises the error of a
    failed one unless you have already fetched it. Its coroutines may be awaited from any task. All
    work is done on a thread of the library's own, so no event loop stalls. Saves of a manager that
    was never closed are finished at interpreter exit, and their errors are written to standard
    error. In a job of several processes, all of them make the same calls.

    Example:
        ```python
        async with ckpt.CheckpointManager("runs/a", preservation=ckpt.policies.LatestN(3)) as mgr:
            start, state = await mgr.resume(init_state)
            await mgr.save(start, state, metrics={"loss": 0.5})
        ```
    """

    if not TYPE_CHECKING:
        __enter__ = __exit__ = refused(
            "use 'async with ckpt.CheckpointManager(...)', or without asyncio 'with "
            "ckpt.sync.CheckpointManager(...)'"
        )

    async def __aenter__(self) -> Self:
        try:
            self._service.preemption.open()
            await self._loop.run(self._service.open)
        except BaseException:
            self._give_up_entering()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Even when cancelled: the snapshots are taken, and committing them takes only seconds.
        with anyio.CancelScope(shield=True):
            await self._close()
        self._raise_unseen(error)

    async def close(self) -> None:
        """Wait for every commit, end the library's thread, and raise unfetched errors of saves.

        Raises:
            CheckpointError: A save failed and its error was not fetched from its commit. Several
                such errors are raised as an `ExceptionGroup`.

        Cancellation: the commits still finish. It may be called several times.

        Example:
            ```python
            mgr = ckpt.CheckpointManager("runs/a")
            await mgr.save(step, state)
            await mgr.close()
            ```
        """
        await self._close()
        self._raise_unseen()

    async def _close(self) -> None:
        try:
            await run_in_thread(self._service.close, abandon_on_cancel=True)
        finally:
            self._service.preemption.close()

    @overload
    async def save(
        self,
        step: SupportsIndex,
        state: Any = None,
        *,
        items: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        metadata: Any = None,
        force: bool = False,
        overwrite: bool = False,
        durable: Literal[False] = False,
        deadline: float | None = None,
    ) -> Commit: ...

    @overload
    async def save(
        self,
        step: SupportsIndex,
        state: Any = None,
        *,
        items: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        metadata: Any = None,
        force: bool = False,
        overwrite: bool = False,
        durable: Literal[True],
        deadline: float | None = None,
    ) -> StepInfo: ...

    async def save(
        self,
        step: SupportsIndex,
        state: Any = None,
        *,
        items: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        metadata: Any = None,
        force: bool = False,
        overwrite: bool = False,
        durable: bool = False,
        deadline: float | None = None,
    ) -> Commit | StepInfo:
        """Take a snapshot and return once it is safe; writing goes on in the background.

        Once this returns, you may donate, delete or change everything you passed. The manager's
        `backlog` decides what happens while another save is under way.

        Args:
            step: The step, 0 or greater.
            state: One PyTree of jax arrays (with any sharding over the local devices), numpy arrays
                and Python scalars; None with `items`.
            items: Several objects by name, instead of `state`.
            metrics: Numbers by name, or dicts of them; jax may still be computing them.
            metadata: JSON values to keep with the step; tuples come back as lists.
            force: Save even if the save policy says no.
            overwrite: Replace the step if it exists. The old one stays until the new is published.
            durable: Return only when the step is durable, and return its `StepInfo`.
            deadline: Seconds after this call at which the save is given up, wherever it is. Nothing
                of it is left; its memory is free once reads and writes that have begun have ended.

        Returns:
            The commit. Await it for durability, or rely on the manager's exit. It is falsy, with
            the reason in `skipped`, if the save policy said no. With `durable`, the `StepInfo`.

        Raises:
            InvalidArgumentError: An argument is invalid. Nothing was changed.
            UnsupportedLeafError: A leaf cannot be stored, or was deleted; names its path.
            StepExistsError: The step exists and `overwrite` is False.
            StorageError: The store failed before the snapshot was complete.
            HandlerError: A handler, or an object that it saves, raised an error.
            SaveSkippedError: With `durable`: the save policy, or the backlog, said no.
            DeadlineExceededError: At the `deadline` the snapshot was not complete, or, with
                `durable`, the step; says in which stage it was. Later, the commit raises it.

        Cancellation: the save is stopped and removed before the cancellation continues.

        Example:
            ```python
            commit = await mgr.save(step, state, metrics={"loss": 0.5})
            info = await mgr.save(step + 1, state, durable=True)
            ```
        """
        true_or_false("durable", durable)
        commit, job, staged = self._service.saves.start(
            step, state, items, metrics, metadata, deadline, force=force, overwrite=overwrite
        )
        try:
            await settled(staged)
            outcome(staged)
            return await commit if durable else commit
        except anyio.get_cancelled_exc_class():
            job.cancel()
            with anyio.CancelScope(shield=True):
                await settled(job.future)
            raise

    def partial(
        self,
        step: SupportsIndex,
        *,
        metrics: Mapping[str, Any] | None = None,
        metadata: Any = None,
        overwrite: bool = False,
    ) -> PartialSave:
        """Save a step in several calls of `part.save`: `async with mgr.partial(step) as part`.

        Arguments and errors are those of `save`. The save policy is not asked.

        Example:
            ```python
            async with mgr.partial(step) as part:
                await part.save({"params": state["params"]})
                await part.save({"opt_state": state["opt_state"]})
            ```
        """
        started = self._service.start_partial(step, metrics, metadata, overwrite=overwrite)
        return PartialSave(started, self)

    async def restore(
        self,
        step: SupportsIndex | None = None,
        like: State | None = None,
        *,
        items: Mapping[str, Any] | Iterable[str] | None = None,
        at: str | None = None,
        adapt: Adapt | Mapping[str, Adapt] | None = None,
        broadcast_bytes: int | None = None,
        fallback: bool = False,
        healthy: bool | Healthy = False,
        memory: ArrayMemory = "jax",
        verify: VerifyMode | None = None,
    ) -> State:
        """Load a committed step.

        Args:
            step: The step; None for the latest.
            like: The target: a tree of the structure to return. Its leaves say what to return:
                `jax.ShapeDtypeStruct` (with sharding and dtype), jax or numpy arrays, Python
                scalars or their types, functions, or `...` to skip a leaf or a whole subtree. None
                restores everything as it was saved. For several items, a dict of targets.
            items: Load these items only: their names, or a mapping of names to targets.
            at: Load only the branch at this leaf path, as if it were the whole tree: with
                `at="params"`, `like` is a target for the parameters alone.
            adapt: How the checkpoint may differ from the target: leaves to select, rename, cast,
                resize, stack or leave out. For several items, a dict may hold one for each. By
                default they must agree.
            broadcast_bytes: In a job of several processes, read shared data only once and exchange
                it over the devices, using this much host memory. All processes pass the same value.
            fallback: Without a step, take the newest one that is whole: a warning names each step
                that is damaged and passed over. If all are, the error of the newest is raised.
            healthy: Without a step, take the newest one that is known to be healthy, by its vital
                signs or a `ckpt.policies.Healthy(allow=...)`; a warning says what it passes over.
            memory: Whose memory the arrays have on CPU devices. `"jax"`: its own, which the next
                step can donate. `"buffers"`: memory of this library, used again once the arrays are
                gone; for evaluators. `"files"`: the files themselves, mapped without a copy.
            verify: With `"device"`, what is on the devices is compared with the vital signs.

        Returns:
            The tree of a step that was saved without item names, else a dict by item name.

        Raises:
            InvalidArgumentError: An argument is invalid.
            StepNotFoundError: There is no such step, none at all, or none that is healthy.
            TargetMismatchError: `like` does not fit; lists every leaf. No array was read.
            CorruptCheckpointError, DeviceMismatchError: Stored data, or what arrived, is damaged.
            HandlerError: A handler, or an object that it loads, raised an error; names the item.

        Cancellation: reading stops and memory is freed before the cancellation continues.

        Example:
            ```python
            state = await mgr.restore(like=state)
            ```
        """
        given = step, like, items, at, adapt, broadcast_bytes, fallback, healthy, memory, verify
        return await self._loop.run_served(self._service.reader.restore, *given)

    @overload
    async def resume(
        self,
        init: Callable[[], Fresh],
        *,
        like: Any = None,
        adapt: Adapt | None = None,
        fallback: bool = True,
        healthy: bool | Healthy = False,
        source: PathLike | None = None,
    ) -> tuple[int, Fresh]: ...

    @overload
    async def resume(
        self,
        init: Fresh,
        *,
        like: Any = None,
        adapt: Adapt | None = None,
        fallback: bool = True,
        healthy: bool | Healthy = False,
        source: PathLike | None = None,
    ) -> tuple[int, Fresh]: ...

    @overload
    async def resume(
        self,
        *,
        items: Mapping[str, Any],
        like: Mapping[str, Any] | None = None,
        adapt: Adapt | Mapping[str, Adapt] | None = None,
        fallback: bool = True,
        healthy: bool | Healthy = False,
        source: PathLike | None = None,
    ) -> tuple[int, dict[str, Any]]: ...

    async def resume(
        self,
        init: Any = None,
        *,
        items: Mapping[str, Any] | None = None,
        like: Any = None,
        adapt: Adapt | Mapping[str, Adapt] | None = None,
        fallback: bool = True,
        healthy: bool | Healthy = False,
        source: PathLike | None = None,
    ) -> tuple[int, Any]:
        """Return the step to go on with, and the state to go on from.

        That is the step after the latest one and the state saved with it; in a new root, step 0
        and the fresh state.

        Args:
            init: The fresh state, or a function without arguments that returns it. To resume a run,
                it is traced by `jax.eval_shape`: its arrays take no memory. It is called for a new
                run, if `adapt` keeps some of its values, and if tracing fails, with a warning.
            items: Instead of `init`, for a step of several items: a dict of their names to fresh
                objects, or to functions that return them. Objects with a state of their own, such
                as data iterators, get it back.
            like: A target instead of `init`, for other shardings; of items, a dict for some.
            adapt: As for `restore`; with `source`, how that may differ, and steps of this run not.
            fallback: As for `restore`: a damaged step is passed over for the one before it.
            healthy: As for `restore`. Steps that are passed over make way when they are saved anew.
            source: Path or URL of a checkpoint that a new run begins from, such as a model to
                fine-tune. Steps of the root come first; they name it: `info.parent`.

        Returns:
            The first step to train, and the state; with `items`, a dict by item name.

        Raises:
            InvalidArgumentError: An argument is invalid.
            StepNotFoundError: There are steps, and none of them can be read, or is healthy.
            CheckpointError: As by `restore`.

        Cancellation: reading stops and memory is freed before the cancellation continues.

        Example:
            ```python
            start, state = await mgr.resume(init_state)
            for step in range(start, 1000):
                state = train_step(state)
                if step % 100 == 0:
                    await mgr.save(step, state)
            ```
        """
        if await self._loop.run(self._service.reader.is_fresh, healthy):
            if source is None:
                return 0, fresh_state(init, items)
            target = source_target(init, items, like, adapt)
            given = source, target, items is not None, adapt
            return 0, await self._loop.run(self._service.reader.begin_from, *given)
        adapt = adapt if source is None else None
        target = resume_target(init, items, like, adapt)
        told = target, items is not None, adapt, fallback, healthy
        return await self._loop.run_served(self._service.reader.resume, *told)

    def watch(
        self,
        *,
        timeout: float | None = None,
        min_interval: float = 0.0,
        until: Until = None,
        after: int | None = None,
        only_latest: bool = False,
        poll_interval: float = 1.0,
        pin: bool = True,
    ) -> Watch:
        """Iterate over the committed steps of this root, including those saved later.

        Arguments and errors are those of `ckpt.watch`.

        Example:
            ```python
            async for info in mgr.watch(until=1000):
                state = await mgr.restore(info.step, like=state)
            ```
        """
        options = WatchOptions(timeout, min_interval, until, after, only_latest, poll_interval, pin)
        return Watch(self._watcher(options))

    async def should_save(self, step: SupportsIndex) -> bool:
        """Return whether `save` would save `step`; only ask about the current step.

        Example:
            ```python
            if await mgr.should_save(step):
                await mgr.save(step, state, metrics={"loss": evaluate(state)})
            ```
        """
        self._service.reached_preemption(step)
        return await self._loop.run(self._service.should_save, step)

    async def all_steps(self) -> list[int]:
        """Return every committed step, ascending, without those under way or failed.

        Example:
            ```python
            steps = await mgr.all_steps()
            ```
        """
        return await self._loop.run(self._service.reader.all_steps)

    async def latest_step(self, *, healthy: bool | Healthy = False) -> int | None:
        """Return the greatest committed step, or healthy one (see `restore`); None without any.

        Example:
            ```python
            is_fresh = await mgr.latest_step() is None
            ```
        """
        return await self._loop.run(self._service.reader.latest_step, healthy)

    async def best_step(self, metric: Metric | None = None, mode: Mode | None = None) -> int | None:
        """Return the committed step with the best metric, or None if no step has it.

        Args:
            metric: Name of a metric, or a function of all metrics of a step. None is the metric of
                the `BestN` in the manager's `preservation`.
            mode: Whether the smallest (`"min"`) or the greatest (`"max"`) value is best.

        Raises:
            InvalidArgumentError: An argument is invalid, or missing without a `BestN`.

        Example:
            ```python
            params = await mgr.restore(await mgr.best_step("loss", "min"), at="params")
            ```
        """
        return await self._loop.run(self._service.reader.best_step, metric, mode)

    async def reload(self) -> None:
        """Read every manifest again. Seldom needed: changes are noticed without it, too.

        Example:
            ```python
            await mgr.reload()
            ```
        """
        await self._loop.run(self._service.reload)

    async def root_metadata(self) -> dict[str, Any]:
        """Return the metadata of the root; empty if it has none.

        Example:
            ```python
            print((await mgr.root_metadata())["model"])
            ```
        """
        return await self._loop.run(self._service.root_metadata)

    async def metadata(self, step: SupportsIndex | None = None) -> StepMetadata:
        """Return structure, shapes, dtypes and shardings of a step, or of the latest; no arrays.

        Raises:
            StepNotFoundError: There is no such step, or none at all.

        Example:
            ```python
            print((await mgr.metadata(100)).tree["params"]["w"].shape)
            ```
        """
        return await self._loop.run(self._service.reader.metadata, step)

    async def metrics(self, step: SupportsIndex | None = None) -> dict[str, float]:
        """Return the metrics a step was saved with; `step` as in `metadata`.

        Example:
            ```python
            print((await mgr.metrics(100))["loss"])
            ```
        """
        return (await self.metadata(step)).info.metrics

    async def verify(
        self,
        step: SupportsIndex | None = None,
        *,
        deep: bool = True,
        sample: float | None = None,
        seed: int | None = None,
        deadline: float | None = None,
    ) -> VerifyReport:
        """Compare a step with its manifest and report all damage by file, item and leaf path.

        Args:
            step: The step; None for the latest.
            deep: Read everything. With False, only compare names, kinds and sizes of files.
            sample: Read only this share of it, chosen at random, from above 0 to 1.
            seed: Makes that choice repeatable.
            deadline: Begin no more files after that many seconds.

        Returns:
            The report, true if nothing is wrong. Damage is reported, never raised.

        Raises:
            StepNotFoundError: There is no such step; it may have been deleted meanwhile.
            UnsupportedFormatError: The step was written in a later format.
            InvalidArgumentError: `sample` or `deadline` is invalid, or given with `deep=False`.

        Cancellation: reading stops and memory is freed before the cancellation continues.

        Example:
            ```python
            report = await mgr.verify(100)
            assert report.ok, report
            ```
        """
        return await self._loop.run(self._service.reader.verify, step, deep, sample, seed, deadline)

    async def delete(self, step: SupportsIndex, *, item: str | None = None) -> None:
        """Delete a committed step. It disappears atomically, then its bytes are removed.

        Files in it that this library did not write are moved beside it, to `<step>.others`. With
        `item`, only that one of several items goes; the rest replaces the step atomically.

        Raises:
            InvalidArgumentError: There is no such item, or it is the only one.
            StepNotFoundError: There is no such step.
            StepPinnedError: The step is pinned.
            ReadOnlyError: The manager is read-only.

        Example:
            ```python
            await mgr.delete(100)
            ```
        """
        await self._loop.run(self._service.delete, step, item)

    async def pin(self, step: SupportsIndex, name: str) -> None:
        """Protect a step from deletion until it is unpinned, even after this run.

        A step may have several pins, each with a name, such as the reason.

        Raises:
            InvalidArgumentError: An argument is invalid.
            StepNotFoundError: There is no such step.

        Example:
            ```python
            await mgr.pin(100, "paper")
            ```
        """
        await self._loop.run(self._service.pin, step, name)

    async def unpin(self, step: SupportsIndex, name: str) -> bool:
        """Remove the pin of that name; return whether there was one.

        Example:
            ```python
            await mgr.unpin(100, "paper")
            ```
        """
        return await self._loop.run(self._service.unpin, step, name)

    async def pins(self) -> dict[int, tuple[Pin, ...]]:
        """Return the pinned steps and their pins, including those of `ckpt.watch`.

        Example:
            ```python
            print([pin.name for pin in (await mgr.pins()).get(100, ())])
            ```
        """
        return await self._loop.run(self._service.pins)

    @property
    def trash(self) -> Trash:
        """Steps that `Deletion(trash=...)` keeps after their deletion, and that can come back."""
        return Trash(self._loop, self._service)

    async def wait_until_finished(self) -> None:
        """Wait for every save that was started, and raise unfetched errors as `close` does.

        By then, the steps that are no longer kept have been deleted, too.

        Example:
            ```python
            await mgr.wait_until_finished()
            ```
        """
        await self._loop.run(self._service.saves.idle)
        self._raise_unseen()
