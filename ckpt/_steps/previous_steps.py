"""The committed steps of a root as policies see them, read only where a policy looks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, overload

import anyio.from_thread
from msgspec import Struct

from ckpt._runtime.threads import run_in_thread
from ckpt._steps.index import IndexedStep, StepIndex, left_behind
from ckpt.errors import CheckpointError, StorageError
from ckpt.policies._context import SavedStep
from ckpt.storage._base import Storage
from ckpt.storage._manifests import read_manifest

if TYPE_CHECKING:
    from ckpt._format.manifest import Manifest

# Manifests that are read at the same time.
_READS = 8


def saved_step(indexed: IndexedStep, behind: Collection[int] = ()) -> SavedStep:
    """Return a committed step as policies see it, without the names of leaves.

    Args:
        indexed: The step.
        behind: When the saves began that the run went back behind.
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


class _Ailing(Struct, frozen=True):
    """The leaves of a step that are odd.

    Attributes:
        nonfinite: Those that have values that are not finite.
        unequal: Those that have unequal replicas.
        unknown: How many arrays have no vital signs.
    """

    nonfinite: tuple[str, ...]
    unequal: tuple[str, ...]
    unknown: int


class AilingLeaves:
    """Which leaves of unhealthy steps are the reason. Its coroutines run on the engine's loop.

    The head of a manifest has their number alone. So the whole of it is read of those steps that
    have some, once for each attempt.
    """

    def __init__(self, storage: Storage) -> None:
        """Read the manifests in `storage`."""
        self._storage = storage
        self._known: dict[tuple[str, int | None, int], _Ailing] = {}
        # Steps whose manifests the storage did not give, the last time.
        self.unread: frozenset[int] = frozenset()

    async def saved_steps(self, found: Iterable[IndexedStep]) -> list[SavedStep]:
        """Return committed steps as preservation policies see them, with the names of leaves.

        What cannot be read, or was replaced meanwhile, has none.
        """
        steps = list(found)
        ailing = {
            _key(each): each for each in steps if each.nonfinite_leaves or each.unequal_leaves
        }
        # Another call may look at other steps meanwhile.
        found_now = {key: known for key, known in self._known.items() if key in ailing}
        unread: set[int] = set()
        limiter = anyio.CapacityLimiter(_READS)
        # A run that has diverged has the same leaves in every step: they are kept once.
        same = {known: known for known in found_now.values()}

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
                    known = await run_in_thread(_ailing_leaves, manifest)
                    found_now[_key(each)] = same.setdefault(known, known)

        async with anyio.create_task_group() as tasks:
            for key, each in ailing.items():
                if key not in found_now:
                    tasks.start_soon(read, each)
        self._known, self.unread = found_now, frozenset(unread)
        none, behind = _Ailing((), (), 0), left_behind(steps)
        leaves = [found_now.get(_key(each), none) for each in steps]
        return [
            replace(
                saved_step(step, behind),
                nonfinite=known.nonfinite,
                unequal=known.unequal,
                unknown_leaves=known.unknown,
            )
            for step, known in zip(steps, leaves, strict=True)
        ]


def _key(step: IndexedStep) -> tuple[str, int | None, int]:
    return step.attempt, step.nonfinite_leaves, step.unequal_leaves


def _ailing_leaves(manifest: Manifest) -> _Ailing:
    # With numpy, which lists of steps do without.
    from ckpt._tree.ailing_leaves import nonfinite_leaves, unequal_leaves

    return _Ailing(
        tuple(nonfinite_leaves(manifest)),
        tuple(unequal_leaves(manifest)),
        manifest.unknown_leaves,
    )


class PreviousSteps(Sequence[SavedStep]):
    """The committed steps of a root as a policy sees them, read when it looks. Used in threads."""

    def __init__(self, index: StepIndex) -> None:
        self._index = index
        self._steps: list[SavedStep] | None = None

    @overload
    def __getitem__(self, at: int) -> SavedStep: ...
    @overload
    def __getitem__(self, at: slice) -> list[SavedStep]: ...
    def __getitem__(self, at: int | slice) -> SavedStep | list[SavedStep]:
        if at == -1 and self._steps is None:
            # The newest alone is what most policies want.
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
