"""The committed steps of a root in the form that policies take, read only if a policy looks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, overload

import anyio.from_thread
from msgspec import Struct

from ckpt._format.history import left_behind
from ckpt._runtime.threads import run_in_thread
from ckpt._steps.index import IndexedStep, StepIndex
from ckpt.errors import CheckpointError, StorageError
from ckpt.keep._questions import SavedStep
from ckpt.storage._base import Storage
from ckpt.storage._manifests import read_manifest

if TYPE_CHECKING:
    from ckpt._format.manifest import JsonValue, Manifest

# Manifests that are read at the same time.
_READS = 8


def saved_step(indexed: IndexedStep, behind: Collection[int] = ()) -> SavedStep:
    """Return a committed step in the form that policies take, without the names of leaves.

    Args:
        indexed: The step.
        behind: Start times of the saves that the run went back behind.
    """
    return SavedStep(
        indexed.step,
        indexed.created_ns / 1e9,
        indexed.metrics,
        indexed.nonfinite_leaves,
        indexed.unequal_leaves,
        groups=indexed.groups,
        left_behind=indexed.created_ns in behind,
    )


class _UnhealthyStep(Struct, frozen=True):
    """The odd leaves of a step; steps with equal leaves share one object.

    Attributes:
        nonfinite: Leaves with values that are not finite.
        unequal: Leaves with unequal replicas.
        unknown: Number of arrays without vital signs.
    """

    nonfinite: tuple[str, ...]
    unequal: tuple[str, ...]
    unknown: int


class UnhealthyLeaves:
    """The names of the odd leaves of unhealthy steps. Its coroutines run on the engine's loop.

    The head of a manifest has only their number. So the whole manifest of a step with odd leaves is
    read, once for each attempt; with `with_metadata`, the manifests of all steps are read.
    """

    def __init__(self, storage: Storage, *, with_metadata: bool = False) -> None:
        self._storage = storage
        self._with_metadata = with_metadata
        self._known: dict[tuple[str, int | None, int], tuple[_UnhealthyStep, JsonValue]] = {}
        # Steps whose manifests the storage could not read in the last call.
        self.unread: frozenset[int] = frozenset()

    async def saved_steps(self, found: Iterable[IndexedStep]) -> list[SavedStep]:
        """Return committed steps in the form that keep policies take, with leaf names.

        A step that cannot be read, or was replaced meanwhile, has no names.
        """
        steps = list(found)
        unhealthy = {
            _key(each): each
            for each in steps
            if each.nonfinite_leaves
            or each.unequal_leaves
            or (self._with_metadata and not each.is_foreign)
        }
        # Collected in a new dict, since another call may look at other steps meanwhile.
        found_now = {key: known for key, known in self._known.items() if key in unhealthy}
        unread: set[int] = set()
        limiter = anyio.CapacityLimiter(_READS)
        none = _UnhealthyStep((), (), 0)
        # A run that has diverged has the same odd leaves in every step: keep them once.
        same = {known: known for known, _ in found_now.values()}

        async def read(each: IndexedStep) -> None:
            async with limiter:
                try:
                    manifest = await read_manifest(self._storage, each.step_dir)
                except StorageError:
                    unread.add(each.step)
                    return
                except CheckpointError:
                    return
                if manifest.attempt == each.attempt:
                    known = none
                    if each.nonfinite_leaves or each.unequal_leaves:
                        known = await run_in_thread(_unhealthy_leaves, manifest)
                    metadata = manifest.metadata if self._with_metadata else None
                    found_now[_key(each)] = same.setdefault(known, known), metadata

        async with anyio.create_task_group() as tasks:
            for key, each in unhealthy.items():
                if key not in found_now:
                    tasks.start_soon(read, each)
        self._known, self.unread = found_now, frozenset(unread)
        behind = left_behind(steps)
        leaves = [found_now.get(_key(each), (none, None)) for each in steps]
        return [
            replace(
                saved_step(step, behind),
                nonfinite=known.nonfinite,
                unequal=known.unequal,
                unknown_leaves=known.unknown,
                custom_metadata=metadata,
            )
            for step, (known, metadata) in zip(steps, leaves, strict=True)
        ]


def _key(step: IndexedStep) -> tuple[str, int | None, int]:
    return step.attempt, step.nonfinite_leaves, step.unequal_leaves


def _unhealthy_leaves(manifest: Manifest) -> _UnhealthyStep:
    # Imported here: this needs numpy, and lists of steps do without it.
    from ckpt._vitals.stored_signs import nonfinite_leaves, unequal_leaves

    return _UnhealthyStep(
        tuple(nonfinite_leaves(manifest)),
        tuple(unequal_leaves(manifest)),
        manifest.unknown_leaves,
    )


class PreviousSteps(Sequence[SavedStep]):
    """The committed steps of a root for a policy, read on demand. Used in threads."""

    def __init__(self, index: StepIndex) -> None:
        self._index = index
        self._steps: list[SavedStep] | None = None

    @overload
    def __getitem__(self, at: int) -> SavedStep: ...
    @overload
    def __getitem__(self, at: slice) -> list[SavedStep]: ...
    def __getitem__(self, at: int | slice) -> SavedStep | list[SavedStep]:
        if at == -1 and self._steps is None:
            # Most policies want only the newest step.
            latest = anyio.from_thread.run(self._index.latest)
            if latest is not None:
                return saved_step(latest)
        return self._every()[at]

    def __len__(self) -> int:
        return len(self._every())

    def __bool__(self) -> bool:
        return bool(self._steps) or anyio.from_thread.run(self._index.latest) is not None

    def _every(self) -> list[SavedStep]:
        if self._steps is None:
            found = anyio.from_thread.run(self._index.refresh)
            self._steps = [saved_step(each) for each in found.values()]
        return self._steps
