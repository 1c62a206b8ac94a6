"""Digest checks: the bytes that were read must be the bytes that were saved."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from ckpt._format.digests import digest
from ckpt._format.leaf_table import UNCHECKED, LeafEntry
from ckpt._plan.chunk_reads import ChunkRead, ReadRequest
from ckpt.errors import CorruptCheckpointError

_MOST_ERRORS = 1000


class DamagedLeaves:
    """Collects damage while reading goes on, so that one broken leaf does not hide the others."""

    def __init__(self) -> None:
        self._errors: list[CorruptCheckpointError] = []

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note the damage that the body raises, alone or in a group, and continue after it."""
        try:
            yield
        except* CorruptCheckpointError as group:
            for error in _flattened(group):
                self.note(error)

    def note(self, error: CorruptCheckpointError) -> None:
        """Note one error; errors beyond a limit are dropped."""
        if len(self._errors) < _MOST_ERRORS:
            self._errors.append(error)

    def raise_if_any(self) -> None:
        """Raise the noted errors, if there are any.

        Raises:
            ExceptionGroup: A group of `CorruptCheckpointError`s.
        """
        if self._errors:
            raise ExceptionGroup("what is stored is damaged", self._errors)


def _flattened(group: BaseExceptionGroup[Any]) -> Iterator[CorruptCheckpointError]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _flattened(error)
        else:
            yield error


def damaged_chunks(request: ReadRequest, error: Exception) -> list[ChunkRead] | None:
    """Return the chunks of a request that could not be read, as the error names them.

    A group names each leaf with a damaged chunk; any other error concerns all chunks.

    Returns:
        The chunks; None if the failure is not one of a storage or its bytes.
    """
    if not isinstance(error, ExceptionGroup):
        return list(request.chunks)
    errors = list(_flattened(error))
    if not all(isinstance(each, CorruptCheckpointError) for each in errors):
        return None
    leaves = {each.leaf for each in errors}
    if None in leaves:
        return list(request.chunks)
    return [chunk for chunk in request.chunks if chunk.leaf.name in leaves]


def damage_of(error: Exception, chunks: Sequence[ChunkRead]) -> Exception:
    """Return `error` reduced to `chunks`, the only ones that no copy could supply."""
    if not isinstance(error, ExceptionGroup):
        return error
    leaves = {chunk.leaf.name for chunk in chunks}
    left = error.subgroup(lambda each: getattr(each, "leaf", None) in {*leaves, None})
    return left or error


def check_chunk(entry: LeafEntry, number: int, data: memoryview) -> None:
    """Check chunk `number` of a leaf against its digest, if it has one.

    `data` are the bytes of its elements in C order.

    Raises:
        CorruptCheckpointError: The bytes differ from those that were saved; names the leaf.
    """
    if entry.digests[number] == UNCHECKED:
        return
    found = digest(data)
    if found != entry.digests[number]:
        raise CorruptCheckpointError(
            f"chunk {number} of {len(entry.digests)} is not what was saved: its digest is {found}, "
            f"the manifest says {entry.digests[number]:.32}. The data was damaged or is missing; "
            "restore another step",
            leaf=entry.name,
        )
