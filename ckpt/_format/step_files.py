"""Files of a step: those of items, those of other libraries, and the part on one process's disk.

`ckpt.part.json`: the part of a step on the disk of one process, for assembling all parts. Where
each process has a disk of its own, its step directory is a part of the step. This file lists the
files that the assembled step takes from the part, and describes their content. Data that several
processes have is listed by only one of them.
"""

from __future__ import annotations

import re
from typing import Annotated, TypeGuard

import msgspec
from msgspec import Meta, Struct

from ckpt._arguments import shown
from ckpt._format.manifest_head import FILE_NAME, INVALID, PART_FILE
from ckpt.errors import CorruptCheckpointError, InvalidArgumentError

_ITEM = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\Z")
# Files by which Orbax knows a step of its own: the first that it writes, and the last.
BEGUN, SUCCESS = "_CHECKPOINT_METADATA", "commit_success.txt"
# Part of the names of steps and items that Orbax has not finished.
UNFINISHED = ".orbax-checkpoint-tmp"
_MARK = "Checkpoint commit was successful to "
# Names that this library and its Orbax view use in an item's directory, beside that of the data;
# the view of one item may be in the directory of its checkpoint, too.
ITEM_FILES = frozenset(
    {"_METADATA", "_sharding", "_strings.json", "array_metadatas", SUCCESS, "manifest.ocdbt"}
)
# Names that Orbax or this library use in the directory of a step or a root.
RESERVED_ITEMS = ITEM_FILES | {
    "AUTO",
    "_CHECKPOINT_DELETION",
    "metrics",
    "orbax.checkpoint",
    BEGUN,
    FILE_NAME,
    PART_FILE,
}
# Name of the item of a save without names.
UNNAMED = "default"
# Every file system takes names of this many bytes, and paths of four times as many below a step.
_MOST_NAME_BYTES = 255
_MOST_BYTES = 1000


def success_mark(step_dir: str) -> bytes:
    """Return the content of `commit_success.txt` in a step of this library: it has the name."""
    return f"{_MARK}{step_dir}".encode()


def is_own_mark(success: bytes | None) -> bool:
    """Return True if this library wrote a file `commit_success.txt`, with the name of a step.

    Orbax writes the path of the step. Any other content is from neither.
    """
    return success is not None and success.startswith(_MARK.encode()) and b"/" not in success


def check_item_name(name: object) -> str:
    """Return `name` if an item may have it.

    Raises:
        InvalidArgumentError: `name` could lead out of the step's directory, or is reserved.
    """
    if not is_item_name(name):
        raise InvalidArgumentError(
            f"item name {shown(name)}: expected 1 to 100 letters, digits, '_', '-' or '.', not "
            f"beginning with '.' or '-', and none of {', '.join(sorted(RESERVED_ITEMS))}"
        )
    return name


def is_item_name(name: object) -> TypeGuard[str]:
    return (
        isinstance(name, str)
        and _ITEM.match(name) is not None
        and name not in RESERVED_ITEMS
        and UNFINISHED not in name
        and not name.startswith("ocdbt.process_")
    )


def check_file_path(path: object) -> str:
    """Return `path` if it may name a file of an item, relative to the item's directory.

    Raises:
        ValueError: `path` could lead out of the directory, is not portable, or is reserved.
    """
    if not isinstance(path, str):
        raise ValueError(f"{path!r:.120} is not a string")
    names = path.split("/")
    if not all(map(_is_name, names)) or len(path.encode()) > _MOST_BYTES:
        raise ValueError(
            f"{path!r:.120} is not a relative path of plain names with '/' between them"
        )
    if names[0] == "d" or names[0] in ITEM_FILES or names[0].startswith("ocdbt.process_"):
        raise ValueError(f"{path!r:.120} is the name of a file of the format itself")
    return path


def _is_name(name: str) -> bool:
    return (
        name not in ("", ".", "..")
        and name.isprintable()
        and "\\" not in name
        and UNFINISHED not in name
        and len(name.encode()) <= _MOST_NAME_BYTES
    )


Text = Annotated[str, Meta(pattern=r"^[^\x00]{1,4096}\Z")]


class SourceFile(Struct, frozen=True):
    """A file outside of the step that holds chunks of it.

    Attributes:
        folder: Path of its directory, or URL of its place in a store.
        path: Path of the file in the folder, with `/`.
        size: Number of bytes that belong to the step, from the beginning of the file.
        fingerprint: A text that changes whenever the file changes. It is compared as long as the
            chunks have no digests.
    """

    folder: Text
    path: Text
    size: Annotated[int, Meta(ge=0, le=1 << 62)]
    fingerprint: str

    @property
    def location(self) -> str:
        """The whole path or URL."""
        return f"{self.folder.rstrip('/')}/{self.path}"


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
