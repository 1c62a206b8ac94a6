"""The exit status of the command, and which errors lead to which."""

from __future__ import annotations

import errno

from ckpt.errors import (
    CheckpointError,
    CoordinationError,
    CorruptCheckpointError,
    StorageError,
    TargetMismatchError,
    UnsupportedFormatError,
)

OK = 0
# Damage, a difference, or another thing that the command is there to find.
FOUND = 1
# Wrong arguments, or a path at which there is not what the command needs.
USAGE = 2
# The storage cannot be reached, or refuses.
UNREACHABLE = 3
INTERRUPTED = 130
# The reader of the output went away.
CLOSED_PIPE = 141

_FOUND = (CorruptCheckpointError, UnsupportedFormatError, TargetMismatchError)
_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR)


def status_of(error: CheckpointError) -> int:
    """Return the exit status that an error leads to."""
    if isinstance(error, _FOUND):
        return FOUND
    if isinstance(error, StorageError):
        return USAGE if error.errno in _NOTHING_THERE else UNREACHABLE
    return UNREACHABLE if isinstance(error, CoordinationError) else USAGE
