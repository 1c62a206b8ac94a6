"""`ManagedSteps`: the part of a manager that lists, describes and changes committed steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, SupportsIndex

from ckpt._api.base import ManagerBase
from ckpt._commit import StepInfo
from ckpt._runtime.loop import EngineLoop
from ckpt._steps.pins import Pin
from ckpt._steps.removal.deletion_plan import TrashedStep
from ckpt.keep._health import Healthy, check_healthy
from ckpt.keep._ranking import Metric, Mode

if TYPE_CHECKING:
    from ckpt._engine.verify.report import VerifyReport
    from ckpt._steps.service import RootService
    from ckpt._steps.step_metadata import StepMetadata


class Trash:
    """The trash of a manager that was opened with `Deletion(trash=...)`.

    On a disk, a step in the trash is a directory in that folder. In a bucket its objects stay where
    they are, and only its manifest goes to `.ckpt-trash`. In both cases it takes as much space as
    before, until `empty` removes it.

    Example:
        ```python
        async with ckpt.CheckpointManager(root, trash="trash") as mgr:
            await mgr.delete(100)
            await mgr.trash.undelete(100)
        ```
    """

    def __init__(self, loop: EngineLoop, service: RootService) -> None:
        """Use the trash of the root that `service` serves."""
        self._loop = loop
        self._service = service

    async def steps(self) -> list[TrashedStep]:
        """Return the steps in the trash, by step; a step may be there several times.

        Raises:
            InvalidArgumentError: The manager has no trash.

        Example:
            ```python
            async with ckpt.CheckpointManager(root, trash="trash") as mgr:
                for each in await mgr.trash.steps():
                    print(each.step, each.deleted, each.path)
            ```
        """
        return await self._loop.run(self._service.trash.steps)

    async def undelete(self, step: SupportsIndex) -> None:
        """Take a step back: it is committed again as it was, in one atomic operation.

        If the step is in the trash several times, the one that was deleted last comes back. A
        policy may delete it again after the next save: pin the step if it is to stay.

        Raises:
            InvalidArgumentError: The manager has no trash.
            StepNotFoundError: The step is not in the trash.
            StepExistsError: The step exists again.
            CorruptCheckpointError: In a bucket: objects of the step are missing.
            ReadOnlyError: The manager is read-only.

        Example:
            ```python
            async with ckpt.CheckpointManager(root, trash="trash") as mgr:
                await mgr.delete(100)
                await mgr.trash.undelete(100)
            ```
        """
        await self._loop.run(self._service.undelete, step)

    async def empty(self, older_than: float = 0.0) -> list[int]:
        """Remove steps from the trash permanently; return their numbers.

        Args:
            older_than: Remove only steps that were deleted at least that many seconds ago.

        Raises:
            InvalidArgumentError: The manager has no trash, or `older_than` is not a number of
                seconds.
            ReadOnlyError: The manager is read-only.

        Cancellation: a step whose removal has begun is removed; the others stay.

        Example:
            ```python
            async with ckpt.CheckpointManager(root, trash="trash") as mgr:
                await mgr.trash.empty(older_than=7 * 24 * 3600)
            ```
        """
        return await self._loop.run(self._service.empty_trash, older_than)


class ManagedSteps(ManagerBase):
    """The part of `CheckpointManager` about committed steps."""

    async def should_save(self, step: SupportsIndex) -> bool:
        """Return True if `save` would save `step`; only ask about the current step.

        Example:
            ```python
            if await mgr.should_save(step):
                await mgr.save(step, state, metrics={"loss": evaluate(state)})
            ```
        """
        self._service.reached_preemption(step)
        return await self._loop.run(self._service.should_save, step)

    async def all_steps(self) -> list[int]:
        """Return the committed steps, ascending, without those under way or failed.

        Example:
            ```python
            steps = await mgr.all_steps()
            ```
        """
        return await self._loop.run(self._service.reader.all_steps)

    async def steps(self) -> list[StepInfo]:
        """Return the `StepInfo` of every committed step, ascending, as one list.

        A step that is deleted meanwhile is not in the list. A step with a damaged manifest is left
        out, with a warning.

        Example:
            ```python
            for info in await mgr.steps():
                print(info.step, info.committed, info.metrics)
            ```
        """
        from ckpt._steps.step_metadata import infos

        return await self._loop.run(infos, self._service.reader)

    async def latest_step(self, *, healthy: bool | Healthy = False) -> int | None:
        """Return the latest committed step, or healthy one (see `restore`); None if there is none.

        It is the greatest step, apart from those that the run went back behind.

        Example:
            ```python
            is_fresh = await mgr.latest_step() is None
            ```
        """
        return await self._loop.run(self._service.reader.latest_step, check_healthy(healthy))

    async def best_step(self, metric: Metric | None = None, mode: Mode | None = None) -> int | None:
        """Return the committed step with the best metric, or None if no step has any metrics.

        Args:
            metric: Name of a metric, or a function of all metrics of a step. None is the metric of
                the `Best` in the manager's `keep`.
            mode: `"min"` if the smallest value is best, `"max"` if the greatest is.

        Raises:
            InvalidArgumentError: An argument is invalid, or missing without a `Best`; or steps
                have metrics, but none has this one.

        Example:
            ```python
            params = await mgr.restore(await mgr.best_step("loss", "min"), at="params")
            ```
        """
        return await self._loop.run(self._service.reader.best_step, metric, mode)

    async def reload(self) -> None:
        """Read every manifest again. Seldom needed: changes are noticed without it.

        Example:
            ```python
            await mgr.reload()
            ```
        """
        await self._loop.run(self._service.reload)

    async def root_metadata(self) -> dict[str, Any]:
        """Return the metadata of the root; if it has none yet, those given to the manager.

        Example:
            ```python
            print((await mgr.root_metadata())["model"])
            ```
        """
        return await self._loop.run(self._service.root_metadata)

    async def metadata(self, step: SupportsIndex | None = None) -> StepMetadata:
        """Return structure, shapes, dtypes and shardings of a step, or the latest; reads no arrays.

        Raises:
            StepNotFoundError: There is no such step, or none at all.

        Example:
            ```python
            print((await mgr.metadata(100)).tree["params"]["w"].shape)
            ```
        """
        return await self._loop.run(self._service.reader.metadata, step)

    async def metrics(self, step: SupportsIndex | None = None) -> dict[str, float]:
        """Return the metrics of a step, as they were saved; `step` as in `metadata`.

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
        timeout: float | None = None,
    ) -> VerifyReport:
        """Compare a step with its manifest and report all damage by file, item and leaf path.

        Args:
            step: The step; None for the latest.
            deep: Read everything. With False, only compare names, kinds and sizes of files.
            sample: Read only this share of the files and of their bytes, chosen at random, above 0
                and up to 1.
            seed: Makes that choice repeatable.
            timeout: Seconds after this call at which no more files are begun.

        Returns:
            The report, true if nothing is wrong. Damage is reported, never raised.

        Raises:
            StepNotFoundError: There is no such step; it may have been deleted meanwhile.
            UnsupportedFormatError: The step was written in a later format.
            InvalidArgumentError: `sample` or `timeout` is invalid, or given with `deep=False`.

        Cancellation: reading stops and memory is freed before the cancellation continues.

        Example:
            ```python
            report = await mgr.verify(100)
            assert report.ok, report
            ```
        """
        return await self._loop.run(self._service.reader.verify, step, deep, sample, seed, timeout)

    async def prefetch(self, step: SupportsIndex | None = None) -> StepInfo:
        """Copy a step from a farther place to the nearest `Tier`, so that reads of it are local.

        The agent copies the step and compares it with its digests; the step is visible at the tier
        only once it is whole. A step that is there already is read and compared, and replaced
        if it is damaged. The step is pinned at its tier, as `prefetched`, so that the policy
        of the tier keeps it: `unpin(step, "prefetched")` releases it. It is not copied on from
        there.

        Args:
            step: The step; None for the latest.

        Returns:
            The `StepInfo` of the step at the tier.

        Raises:
            InvalidArgumentError: The manager has no `Tier`.
            StepNotFoundError: There is no such step, or it is only in memory.
            StepExistsError: Another save of the step is at the tier.
            CorruptCheckpointError: The step is damaged in the farther places.
            StorageError: A place refused, such as a full disk; nothing is left there.

        Cancellation: the step may be copied all the same, without a pin.

        Example:
            ```python
            disk = ckpt.tiers.Tier("nvme/run")
            async with ckpt.CheckpointManager("runs/a", tiers=[disk]) as mgr:
                info = await mgr.prefetch(100)
                print(info.path)
            ```
        """
        return await self._loop.run(self._service.prefetch, step)

    async def delete(self, step: SupportsIndex, *, item: str | None = None) -> None:
        """Delete a committed step. It disappears atomically, then its bytes are removed.

        Files in it that this library did not write are moved beside it, to `<step>.others`. With
        `item`, only this item goes; a step with the remaining items replaces it atomically.

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
        """Remove the pin of that name; return True if there was one.

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
        """Steps that are kept in the `trash` of the manager, and that can come back."""
        return Trash(self._loop, self._service)
