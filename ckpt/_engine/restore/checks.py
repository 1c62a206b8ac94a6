"""Whether bytes that were read are those that were saved."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from ckpt._format.digests import digest
from ckpt._format.manifest import LeafEntry
from ckpt.errors import CorruptCheckpointError

__all__ = ["DamagedLeaves", "check_chunk", "digest_error"]


_MOST_ERRORS = 1000


class DamagedLeaves:
    """What is found damaged while all of it is read: one broken leaf does not hide the others."""

    def __init__(self) -> None:
        self._errors: list[CorruptCheckpointError] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note the damage that the body meets, one or a group, and go on behind it."""
        try:
            yield
        except* CorruptCheckpointError as group:
            for error in _flattened(group):
                self.note(error)

    def note(self, error: CorruptCheckpointError) -> None:
        """Note a piece of damage; of very many the first will do."""
        if len(self._errors) < _MOST_ERRORS:
            self._errors.append(error)

    def told(self) -> None:
        """Raise all that was noted, if anything was.

        Raises:
            ExceptionGroup: Of one `CorruptCheckpointError` for every piece of damage.
        """
        if self._errors:
            raise ExceptionGroup("what is stored is damaged", self._errors)


def _flattened(group: BaseExceptionGroup[Any]) -> Iterator[CorruptCheckpointError]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _flattened(error)
        else:
            yield error


def check_chunk(entry: LeafEntry, number: int, array: np.ndarray[Any, Any]) -> None:
    """Check the elements of chunk `number` of a leaf, C-contiguous in `array`.

    Raises:
        CorruptCheckpointError: They are not what was saved; names the leaf.
    """
    error = digest_error(entry, number, digest(array.reshape(-1).view(np.uint8).data))
    if error is not None:
        raise error


def digest_error(entry: LeafEntry, number: int, found: str) -> CorruptCheckpointError | None:
    """Return what is wrong with chunk `number` of a leaf whose digest is `found`, or None."""
    if found == entry.digests[number]:
        return None
    return CorruptCheckpointError(
        f"chunk {number} of {len(entry.digests)} is not what was saved: its digest is {found}, "
        f"the manifest says {entry.digests[number]:.32}. The data was damaged or is missing; "
        "restore another step",
        leaf=entry.name,
    )
