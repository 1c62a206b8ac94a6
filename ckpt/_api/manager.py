"""`CheckpointManager`, for asyncio and trio programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, SupportsIndex, overload

from ckpt._api import waits
from ckpt._api.base import refused
from ckpt._api.hints import hinted
from ckpt._api.managed_steps import ManagedSteps
from ckpt._arguments import true_or_false
from ckpt._commit import Commit, StepInfo
from ckpt._settings import ArrayMemory, IfExists, IfTaken
from ckpt._steps.restore_options import options_onto, restore_options
from ckpt._steps.saves import after_saves
from ckpt.keep._health import Healthy, check_healthy
from ckpt.storage._resolve import PathLike

if TYPE_CHECKING:
    from ckpt._api.partial import PartialSave
    from ckpt._api.resumption import Fresh, State
    from ckpt._api.watch import Watch
    from ckpt._plan.adapt import Adapt
    from ckpt._steps.watcher import Until


class CheckpointManager(ManagedSteps):
    """Saves and restores the steps of one directory while training continues.

    Use it as `async with`: leaving the block waits for every commit, and raises the error of a
    failed one unless its commit or the next save did. Its coroutines may be awaited from any task.
    All work is done on a thread of the library's own, so no event loop stalls. Saves of a manager
    that was never closed are finished at interpreter exit, and their errors are written to standard
    error. In a job of several processes, all of them make the same calls.

    Example:
        ```python
        async with ckpt.CheckpointManager("runs/a", keep=3) as mgr:
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
            self._service.listen()
            await self._loop.run(self._service.open)
        except BaseException:
            # Python does not call the exit of a block that was not entered.
            self._loop.stop()
            self._service.stop_listening()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Not cut short: the snapshots are taken, and committing them takes only seconds.
        await waits.shielded(partial(self._close, failed=error is not None))
        self._raise_unseen(error)

    async def close(self) -> None:
        """Wait for every commit, end the library's thread, and raise unchecked failures.

        Raises:
            CheckpointError: A save has failed, and nobody has checked its commit. If several have
                failed, it is the first error, with a note that names the others.

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

    async def _close(self, *, failed: bool = False) -> None:
        try:
            await waits.beside(partial(self._service.close, failed=failed))
        finally:
            self._service.stop_listening()

    @overload
    async def save(
        self,
        step: SupportsIndex,
        state: Any = None,
        *,
        items: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        custom_metadata: Any = None,
        force: bool = False,
        if_exists: IfExists = "equal",
        durable: Literal[False] = False,
        timeout: float | None = None,
    ) -> Commit: ...

    @overload
    async def save(
        self,
        step: SupportsIndex,
        state: Any = None,
        *,
        items: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        custom_metadata: Any = None,
        force: bool = False,
        if_exists: IfExists = "equal",
        durable: Literal[True],
        timeout: float | None = None,
    ) -> StepInfo | None: ...

    @hinted
    async def save(
        self,
        step: SupportsIndex,
        state: Any = None,
        *,
        items: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        custom_metadata: Any = None,
        force: bool = False,
        if_exists: IfExists = "equal",
        durable: bool = False,
        timeout: float | None = None,
    ) -> Commit | StepInfo | None:
        """Take a snapshot and return once it is safe; writing goes on in the background.

        Once this returns, you may donate, delete or change everything you passed. The `backlog`
        of the manager's `staging` decides what happens while another save is under way. If an
        earlier save failed and its commit was never checked, this call raises that error before
        anything of `step` begins; call it again to save `step`. With `force`, `step` is saved
        first.

        Args:
            step: The step, 0 or greater.
            state: One PyTree of jax arrays (with any sharding over the local devices), numpy arrays
                and Python scalars; None with `items`.
            items: Several objects by name, instead of `state`.
            metrics: Numbers by name, or dicts of them; jax may still be computing them. Texts and
                lists are kept with them; `info.metrics` has the numbers.
            custom_metadata: JSON values to keep with the step; tuples come back as lists.
            force: Save even if the save policy says no.
            if_exists: What happens if the step exists. `"equal"` skips the save if it would store
                the same items, and raises an error if they differ. `"error"` always raises,
                `"skip"` always skips. `"replace"` replaces it: the old one stays until the new one
                is published.
            durable: Return only when the step is durable, and return its `StepInfo`; None if
                nothing was saved.
            timeout: Seconds after this call at which the save is given up, wherever it is. Nothing
                of it is left; its memory is free once reads and writes that have begun have ended.

        Returns:
            The commit. Await it for durability, or rely on the manager's exit. It is falsy, with
            the reason in `skipped`, if policy or backlog refused the save, or if the step exists
            and need not be saved again. With `durable`, the `StepInfo`, or None in place of a falsy
            commit.

        Raises:
            InvalidArgumentError: An argument is invalid. Nothing was changed.
            UnsupportedLeafError: A leaf cannot be stored, or was deleted; the error names its path.
            StepExistsError: The step exists, and is neither equal nor to be skipped or replaced.
            StorageError: The store failed before the snapshot was complete; in a job of several
                processes, the commit raises this error.
            CheckpointError: An earlier save has failed, and nobody has checked its commit.
            HandlerError: A handler, or an object that it saves, raised an error.
            DeadlineExceededError: At the `timeout` the snapshot was not complete, or with
                `durable` the step; the error names the stage of the save. Later, the commit raises
                it.

        Cancellation: the save is stopped and removed before the cancellation continues.

        Example:
            ```python
            commit = await mgr.save(step, state, metrics={"loss": 0.5})
            info = await mgr.save(step + 1, state, durable=True)
            ```
        """
        true_or_false("durable", durable)
        # plain: self._loop.check_caller()
        commit, job, staged = self._service.saves.start(
            step, state, items, metrics, custom_metadata, timeout, force=force, if_exists=if_exists
        )
        await waits.snapshot_taken(job, staged)
        return await waits.durable(job, commit) if durable else commit

    async def snapshot(
        self,
        step: SupportsIndex,
        state: Any = None,
        *,
        items: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        custom_metadata: Any = None,
    ) -> Commit:
        """Put the state into the memory of this host, where it outlives this process.

        It returns when `save` would: once you may donate what you passed. Nothing is written to a
        storage. `resume` and `restore` find the last snapshot when a process is started again on
        this host. If this process dies, or is told to end, a helper process writes the snapshot to
        the root as an ordinary step. A newer snapshot replaces it once that is whole, and a clean
        end removes it.

        Args:
            step: The step, 0 or greater.
            state: As for `save`.
            items: As for `save`.
            metrics: As for `save`.
            custom_metadata: As for `save`.

        Returns:
            The commit: done once the snapshot is whole. It is falsy, with the reason in `skipped`,
            if there is no room for it; a warning says so, too.

        Raises:
            InvalidArgumentError: An argument is invalid, or the manager has no tier in memory.
            UnsupportedLeafError: A leaf cannot be stored, or was deleted; the error names its path.
            HandlerError: A handler, or an object that it saves, raised an error.
            CheckpointError: An earlier save has failed; see `save`.

        Cancellation: the snapshot is stopped and removed before the cancellation continues.

        Example:
            ```python
            memory = ckpt.tiers.SharedMemory()
            async with ckpt.CheckpointManager("runs/a", tiers=[memory]) as mgr:
                await mgr.snapshot(step, state)
            ```
        """
        # plain: self._loop.check_caller()
        commit, job, staged = self._service.start_snapshot(
            step, state, items, metrics, custom_metadata
        )
        await waits.snapshot_taken(job, staged)
        return commit

    def partial(
        self,
        step: SupportsIndex,
        *,
        metrics: Mapping[str, Any] | None = None,
        custom_metadata: Any = None,
        if_exists: IfTaken = "error",
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
        from ckpt._api.partial import PartialSave

        # plain: self._loop.check_caller()
        started = self._service.start_partial(step, metrics, custom_metadata, if_exists=if_exists)
        return PartialSave(started, self)

    @hinted
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
        check_devices: bool = False,
    ) -> State:
        """Load a committed step.

        Args:
            step: The step; None for the latest.
            like: The target: a tree of the structure to return. Each leaf describes the result:
                `jax.ShapeDtypeStruct` (with sharding and dtype), jax or numpy arrays, Python
                scalars or their types, functions, or `...` to skip a leaf or a whole subtree. None
                restores everything as it was saved. For several items, a dict of targets.
            items: Load these items only: their names, or a mapping of names to targets.
            at: Load only the branch at this leaf path, as if it were the whole tree: with
                `at="params"`, `like` is a target for the parameters alone.
            adapt: Allowed differences between the checkpoint and the target: leaves to select,
                rename, cast, resize, stack or leave out. For several items, a dict may hold one for
                each. By default they must agree.
            broadcast_bytes: In a job of several processes, read shared data only once and exchange
                it over the devices, using this much host memory. All processes pass the same value.
            fallback: Without a step, take the newest one that is whole: a warning names each
                damaged step that is passed over. If all are damaged, the error of the newest is
                raised.
            healthy: Without a step, take the newest one that is known to be healthy, by its vital
                signs or a `ckpt.keep.Healthy(allow=...)`; a warning names the steps that are
                passed over.
            memory: Kind of memory of the arrays on CPU devices. `"jax"`: memory of jax, which the
                next step can donate. `"buffers"`: memory of this library, used again once the
                arrays are gone; for evaluators. `"files"`: the files themselves, mapped without a
                copy.
            check_devices: Compare the arrays on the devices with the vital signs.

        Returns:
            The tree of a step that was saved without item names, else a dict by item name.

        Raises:
            InvalidArgumentError: An argument is invalid.
            StepNotFoundError: There is no such step, none at all, or none that is healthy.
            TargetMismatchError: `like` does not fit; the error lists every leaf. No array was read.
            ContractMismatchError: The step is of another contract (`ckpt.extensions.Contract`).
            CorruptCheckpointError, DeviceMismatchError: Stored data is damaged, or an array on a
                device is.
            HandlerError: A handler, or an object that it loads, raised an error; the error names
                the item.

        Cancellation: reading stops and memory is freed before the cancellation continues.

        Example:
            ```python
            state = await mgr.restore(like=state)
            ```
        """
        given = like, items, at, adapt, memory, check_devices, broadcast_bytes, fallback
        wanted = check_healthy(healthy) if healthy is not False else None
        call = self._service, step, restore_options(*given, wanted)
        found: State = await self._loop.run_served(after_saves.restore, *call)
        return found

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

    @hinted
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

        These are the step after the latest one and the state saved with the latest one; in a new
        root, step 0 and the fresh state.

        Args:
            init: The fresh state, or a function without arguments that returns it. To resume a run,
                the function is traced by `jax.eval_shape`: its arrays take no memory. It is called
                for a new run, if `adapt` keeps some of its values, and, with a warning, if tracing
                fails.
            items: Instead of `init`, for a step of several items: a dict of their names to fresh
                objects, or to functions that return them. Objects with a state of their own, such
                as data iterators, get it back.
            like: A target instead of `init`, for other shardings; for items, a dict for some.
            adapt: As for `restore`. With `source`, the allowed differences of that checkpoint;
                steps of this run must then agree.
            fallback: As for `restore`: a damaged step is passed over for the one before it.
            healthy: As for `restore`. New saves of steps that are passed over replace them.
            source: Path or URL of a checkpoint that a new run begins from, such as a model to
                fine-tune. Steps of the root come first; `info.parent` of the run's steps names it.

        Returns:
            The first step to train, and the state; with `items`, a dict by item name.

        Raises:
            InvalidArgumentError: An argument is invalid.
            StepNotFoundError: There are steps, but none of them can be read, or is healthy.
            CheckpointError: As for `restore`.

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
        from ckpt._api.resumption import fresh_state, resume_target, source_target

        wanted = check_healthy(healthy) if healthy is not False else None
        start = await self._loop.run(after_saves.start_of_run, self._service, wanted)
        if start.is_fresh and source is None:
            return 0, fresh_state(init, items)
        adapt = adapt if start.is_fresh or source is None else None
        target = (source_target if start.is_fresh else resume_target)(init, items, like, adapt)
        options = options_onto(target, items, adapt, fallback, wanted)
        if start.is_fresh:
            return 0, await self._loop.run(self._service.reader.begin_from, source, options)
        return await self._loop.run_served(self._service.reader.resume, start, options)

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
        from ckpt._api.watch import Watch
        from ckpt._calls.watches import watcher_of

        options = timeout, min_interval, until, after, only_latest, poll_interval, pin
        return Watch(watcher_of(self._given, self._service.root.names, self._timeouts, *options))

    async def wait_until_finished(self) -> None:
        """Wait for every save that was started, and raise failures, as `close` does.

        If several calls wait, all of them raise the error. By then, the steps that are no longer
        kept have been deleted, too.

        Example:
            ```python
            await mgr.wait_until_finished()
            ```
        """
        await self._loop.run(self._service.wait_until_finished)
