"""The committed steps of a root as policies see them, read only where a policy looks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import anyio.from_thread

from ckpt._steps.index import IndexedStep, StepIndex
from ckpt.policies._context import SavedStep


def saved_step(indexed: IndexedStep) -> SavedStep:
    """Return a committed step as policies see it."""
    return SavedStep(indexed.step, indexed.created_ns / 1e9, indexed.metrics)


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
