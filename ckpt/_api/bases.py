"""The parts that both faces of an object share: everything that never waits."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from ckpt._commit import StepInfo
from ckpt.errors import CheckpointError, InvalidArgumentError

if TYPE_CHECKING:
    from ckpt._steps.saves.partial import OpenSave

# Reason given for discarding a save that its owner dropped.
_DROPPED = "it was dropped without finalize() or discard()"


def refused(advice: str) -> Callable[..., Any]:
    """Return a method that raises for syntax that a class does not have; `advice` is the text."""

    def refuse(self: object, *_: object) -> NoReturn:
        raise InvalidArgumentError(advice)

    return refuse


class PartialSaveBase:
    """The part of a partial save that both faces share: the methods that never wait."""

    def __init__(self, save: OpenSave, owner: object = None) -> None:
        """Called by a manager only; `owner` is kept alive."""
        self._save = save
        self._owner = owner
        self._info: StepInfo | None = None
        weakref.finalize(self, save.abandon, _DROPPED).atexit = False

    @property
    def step(self) -> int | None:
        """The step."""
        return self._save.request.step

    @property
    def info(self) -> StepInfo:
        """The `StepInfo` of the step.

        Raises:
            CheckpointError: The step is not published yet: the block has not ended.
        """
        if self._info is None:
            raise CheckpointError(
                "the partial save is not published yet: read info after the block, or after "
                "finalize()",
                step=self.step,
            )
        return self._info

    def __repr__(self) -> str:
        return repr(self._save)

    def _note_failure(self, error: BaseException) -> None:
        """Add an earlier failure of the save, which may not have been seen, to `error`."""
        failure = self._save.failure()
        if failure is not None and failure is not error:
            error.add_note(f"the partial save of step {self.step} had failed: {failure}")
