"""Exit status of the command, and its choice by the class of the error."""

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
# Damage, a difference, or another finding of the command.
FOUND = 1
# Wrong arguments, or a path that does not have what the command needs.
USAGE = 2
# The storage cannot be reached, or refuses.
UNREACHABLE = 3
INTERRUPTED = 130
# The reader of the output went away.
CLOSED_PIPE = 141

_FOUND = (CorruptCheckpointError, UnsupportedFormatError, TargetMismatchError)
_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR)


def status_of(error: CheckpointError) -> int:
    """Return the exit status for an error."""
    if isinstance(error, _FOUND):
        return FOUND
    if isinstance(error, StorageError):
        return USAGE if error.errno in _NOTHING_THERE else UNREACHABLE
    return UNREACHABLE if isinstance(error, CoordinationError) else USAGE
