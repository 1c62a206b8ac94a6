"""The committed steps of a root in the form that policies take, read only if a policy looks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, overload

import anyio.from_thread
from msgspec.structs import asdict

from ckpt._format.history import left_behind
from ckpt._runtime.threads import run_in_thread
from ckpt._steps.index import IndexedStep, StepIndex
from ckpt.errors import CheckpointError, StorageError
from ckpt.keep._questions import LeafNotes, SavedStep
from ckpt.storage._base import Storage
from ckpt.storage._manifests import read_manifest

if TYPE_CHECKING:
    from ckpt._format.manifest import JsonValue

# Manifests that are read at the same time.
_READS = 8


def saved_step(
    indexed: IndexedStep,
    behind: Collection[int] = (),
    notes: LeafNotes | None = None,
    metadata: Any = None,
) -> SavedStep:
    """Return a committed step in the form that policies take.

    Args:
        indexed: The step.
        behind: Start times of the saves that the run went back behind.
        notes: The notes on its leaves, by name; None for those in the head of its manifest.
        metadata: Its `custom_metadata`, as far as policies get it.
    """
    return SavedStep(
        indexed.step,
        indexed.created_ns / 1e9,
        indexed.metrics,
        groups=indexed.groups,
        left_behind=indexed.created_ns in behind,
        custom_metadata=metadata,
        **asdict(indexed.notes if notes is None else notes),
    )


class NamedNotes:
    """The notes on leaves of steps, with the names. Its coroutines run on the engine's loop.

    The head of a manifest has only the number of these leaves. So the whole manifest of a step with
    notes is read, once for each attempt; with `with_metadata`, the manifests of all steps are read.
    """

    def __init__(self, storage: Storage, *, with_metadata: bool = False) -> None:
        self._storage = storage
        self._with_metadata = with_metadata
        self._known: dict[tuple[str, LeafNotes], tuple[LeafNotes, JsonValue]] = {}
        # Steps whose manifests the storage could not read in the last call.
        self.unread: frozenset[int] = frozenset()

    async def saved_steps(self, found: Iterable[IndexedStep]) -> list[SavedStep]:
        """Return committed steps in the form that keep policies take, with leaf names.

        A step that cannot be read, or was replaced meanwhile, has no names.
        """
        steps = list(found)
        wanted = {
            (each.attempt, each.notes): each
            for each in steps
            if each.notes or (self._with_metadata and not each.is_foreign)
        }
        # Collected in a new dict, since another call may look at other steps meanwhile.
        found_now = {key: known for key, known in self._known.items() if key in wanted}
        unread: set[int] = set()
        limiter = anyio.CapacityLimiter(_READS)
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
                    known = each.notes
                    if known:
                        # Imported here: this needs numpy, and lists of steps do without it.
                        from ckpt.extensions import notes_of_step

                        known = await run_in_thread(notes_of_step, manifest)
                    metadata = manifest.metadata if self._with_metadata else None
                    found_now[each.attempt, each.notes] = same.setdefault(known, known), metadata

        async with anyio.create_task_group() as tasks:
            for key, each in wanted.items():
                if key not in found_now:
                    tasks.start_soon(read, each)
        self._known, self.unread = found_now, frozenset(unread)
        behind, unnamed = left_behind(steps), (None, None)
        return [
            saved_step(each, behind, *found_now.get((each.attempt, each.notes), unnamed))
            for each in steps
        ]


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
