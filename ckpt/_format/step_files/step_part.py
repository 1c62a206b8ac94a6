"""`ckpt.part.json`: the part of a step on the disk of one process, for assembling all parts.

Where each process has a disk of its own, its step directory is a part of the step. This file lists
the files that the assembled step takes from the part, and describes their content. Data that
several processes have is listed by only one of them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ckpt._format.manifest_head import INVALID
from ckpt.errors import CorruptCheckpointError

_Number = Annotated[int, Meta(ge=0, lt=1 << 31)]


class StepPart(Struct, frozen=True):
    """The part of a step that one process has saved.

    Attributes:
        files: The files that the assembled step takes from this part, relative to the step.
        report: The content of those files, as a `SaveReport` in bytes.
    """

    process: _Number
    count: _Number
    files: tuple[str, ...]
    report: bytes


_PARTS = msgspec.json.Decoder(StepPart)


def encode_part(part: StepPart) -> bytes:
    return msgspec.json.encode(part)


def decode_part(data: bytes, where: str) -> StepPart:
    """Return the part whose file has these bytes; `where` is the file, for messages.

    Raises:
        CorruptCheckpointError: `data` is not such a file.
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
