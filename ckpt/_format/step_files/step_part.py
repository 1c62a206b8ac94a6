"""`ckpt.part.json`: what one process of a job has of a step, for putting all parts together.

Where each process has a disk of its own, its step directory is a part of the step. This file says
which of its files a step needs that is made of all parts, and what is in them. What another process
has as well is left out on all but one of them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ckpt._format.manifest_head import INVALID, MAX_BYTES
from ckpt.errors import CorruptCheckpointError

PART_FILE = "ckpt.part.json"
MOST_PART_BYTES = MAX_BYTES
_Number = Annotated[int, Meta(ge=0, lt=1 << 31)]


class StepPart(Struct, frozen=True):
    """The part of a step that one process has saved.

    Attributes:
        process: Its number.
        count: How many processes there are.
        files: The files that a step of all parts takes from this one, relative to the step.
        report: What is in them, as a `WriteReport` in bytes.
    """

    process: _Number
    count: _Number
    files: tuple[str, ...]
    report: bytes


_PARTS = msgspec.json.Decoder(StepPart)


def encode_part(part: StepPart) -> bytes:
    """Return the bytes of the file."""
    return msgspec.json.encode(part)


def decode_part(data: bytes, where: str) -> StepPart:
    """Return the part whose file has these bytes; `where` is the file, for messages.

    Raises:
        CorruptCheckpointError: They are not such a file.
    """
    try:
        part = _PARTS.decode(data)
    except INVALID as error:
        raise CorruptCheckpointError(f"{where} cannot be read: {error!s:.200}") from error
    if part.process >= part.count:
        raise CorruptCheckpointError(
            f"{where}: process {part.process} of {part.count} does not exist"
        )
    return part
