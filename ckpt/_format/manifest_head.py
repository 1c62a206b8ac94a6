"""The head of `ckpt.json`, from which lists of steps are made, and the check of the whole file.

This module needs no numpy, so that a list of a thousand steps takes only as long as reading their
heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ckpt._format.digests import digest
from ckpt._format.history import DroppedItem, Step
from ckpt._format.metrics import Metrics

FILE_NAME = "ckpt.json"
# Lists what a step of all parts takes from that of one process; see `step_part`.
PART_FILE = "ckpt.part.json"
# Manifests of checkpoints of other libraries have another format, and are never written.
OWN_FORMAT = "ckpt"
FORMAT_VERSION = 1
# Chunks may be compressed.
COMPRESSION = "compression"
# The files may be in a folder of the step directory.
FOLDER = "folder"
# Other processes have other chunks of the arrays, on disks of their own.
OWN_DISKS = "own_disks"
# Data files may lie outside of the step, where another library wrote them.
VIRTUAL = "virtual"
SUPPORTED_FEATURES: frozenset[str] = frozenset({COMPRESSION, FOLDER, OWN_DISKS, VIRTUAL})
# A manifest takes about 100 bytes a leaf, so this is room for two million leaves; a larger file is
# refused before it is parsed.
MAX_BYTES = 256 << 20

HEAD_KEY = b',"head":"xxh3_128:'
TRAILER_KEY = b',"checksum":"xxh3_128:'
TRAILER_END = b'"}\n'
HEX_DIGITS = 32
# Enough for the heads of most steps, of up to 100 files.
HEAD_BYTES = 16 << 10

# Errors of reading invalid JSON, which depend on the version of msgspec.
INVALID = (msgspec.MsgspecError, ValueError, RecursionError)

# Bounded, so that no number in a file can make a date impossible.
Size = Annotated[int, Meta(ge=0, le=1 << 62)]
UnixTime = Annotated[int, Meta(ge=0, le=1 << 62)]
MOST_STEPS = 10**19
Folder = Annotated[str, Meta(pattern=r"^([0-9a-f]{32})?\Z")]


class FileEntry(Struct, frozen=True, omit_defaults=True):
    """One file of the step.

    Attributes:
        size: Size in bytes.
        digest: xxh3_128 of the file.
        shared: True if the save took it over from the step before, and wrote no byte of it.
    """

    size: Size
    digest: str
    shared: bool = False


class Summary(Struct, frozen=True, omit_defaults=True):
    """The head of a manifest, from which lists of steps are made; attributes as in `Manifest`.

    Attributes:
        nonfinite_leaves: Number of leaves with values that are not finite; None if unknown.
        unequal_leaves: Number of leaves whose replicas were not equal.
        dropped: The items that were taken out of the step after it was committed.
        fileless: Names of the items without files.
        left_behind: Start times of the saves of greater steps that its run went back behind, in
            Unix nanoseconds.
        rest: Bytes of the file after the head.
        manifest_bytes: Bytes of the file itself; set by `peek`, and not in the file.
    """

    format: str
    version: int
    requires: list[str] = []
    step: Step | None = None
    attempt: str = ""
    save: str = ""
    metrics: Metrics | None = None
    created_ns: UnixTime = 0
    committed_ns: UnixTime = 0
    folder: Folder = ""
    files: dict[str, FileEntry] = {}
    nonfinite_leaves: Size | None = None
    unequal_leaves: Size = 0
    dropped: list[DroppedItem] = []
    fileless: list[str] = []
    left_behind: list[UnixTime] = []
    rest: Size = 0
    manifest_bytes: Size = 0

    @property
    def sizes(self) -> dict[str, int]:
        """The size in bytes of every file but the manifest, by path in the step directory."""
        return sizes_in(self.folder, self.files)

    @property
    def tops(self) -> frozenset[str]:
        """The directories of the step: each item with files has one, and so have metrics."""
        return tops_of(self.files)


# Made once, before there are threads: msgspec analyses a type that contains dataclasses at its
# first use, and two threads that do so at the same time can crash the interpreter.
SUMMARIES = msgspec.json.Decoder(Summary)


class Origin(Struct, frozen=True):
    """The writer of a step, as attributes of `Manifest`."""

    writer: dict[str, str]
    process_count: int


class Version(Struct, frozen=True):
    """The part of a manifest that decides whether the rest may be read at all."""

    format: str
    version: int
    requires: list[str] = []
    step: Step | None = None


def sizes_in(folder: str, files: Mapping[str, FileEntry]) -> dict[str, int]:
    start = f"{folder}/" if folder else ""
    return {start + path: each.size for path, each in files.items()}


def tops_of(files: Iterable[str]) -> frozenset[str]:
    return frozenset(path.partition("/")[0] for path in files if "/" in path)


def is_whole(data: bytes) -> bool:
    """Return True if `data` is a complete, unchanged `ckpt.json`, without parsing it.

    Example:
        ```python
        data = Path("runs/a/100/ckpt.json").read_bytes()
        assert ckpt.manifest.is_whole(data)
        ```
    """
    split = len(data) - len(TRAILER_KEY) - HEX_DIGITS - len(TRAILER_END)
    if split < 0 or not data.startswith(TRAILER_KEY, split):
        return False
    # No copy is made of the body, which may be large.
    found = digest(memoryview(data)[:split]).encode()
    return data.endswith(TRAILER_KEY + found + TRAILER_END)


def peek(data: bytes, size: int | None = None) -> Summary | None:
    """Return the summary of a `ckpt.json`; None if it is cut, or not a manifest.

    Only the head and the length of the file are checked. A change in the rest is found when the
    rest is read. A manifest of a later format has a summary, too, though this library cannot read
    the rest.

    Args:
        data: The file, or its beginning (`HEAD_BYTES` are enough for most).
        size: Bytes of the whole file, if `data` is only its beginning.

    Example:
        ```python
        summary = ckpt.manifest.peek(Path("runs/a/100/ckpt.json").read_bytes())
        assert summary is not None and summary.step == 100
        ```
    """
    total = len(data) if size is None else size
    head, end = split_head(data)
    if head is None:
        # A later format may have another head.
        found = version_of(data) if total == len(data) and is_whole(data) else None
    else:
        try:
            summary = SUMMARIES.decode(head)
        except INVALID:
            found = version_of(head)
        else:
            if total != end + summary.rest or not is_step(summary.step):
                return None
            return msgspec.structs.replace(summary, manifest_bytes=total)
    if found is None or not is_step(found.step):
        return None
    return Summary(format=found.format, version=found.version, step=found.step)


def origin_of(data: bytes, size: int) -> Origin | None:
    """Return the writer of a step from its whole manifest; None if that is cut, changed or unknown.

    The writer stands behind the items, which are skipped and not decoded.

    `data` is the file or its beginning, and `size` the bytes of the whole file.
    """
    if len(data) < size or not is_whole(data):
        return None
    try:
        return msgspec.json.decode(data, type=Origin)
    except INVALID:
        return None


def split_head(data: bytes) -> tuple[bytes | None, int]:
    """Return the head of a manifest as JSON, and its end; None if the head is not whole."""
    # Quotation marks within a text of JSON are escaped, so this is the member.
    at = data.find(HEAD_KEY)
    end = at + len(HEAD_KEY) + HEX_DIGITS
    front = memoryview(data)[: max(at, 0)]
    if at < 0 or data[end - HEX_DIGITS : end + 1] != digest(front).encode() + b'"':
        return None, 0
    return bytes(front) + b"}", end + 1


def version_of(data: bytes) -> Version | None:
    try:
        return msgspec.json.decode(data, type=Version)
    except INVALID:
        return None


def save_id(save: str, created_ns: int) -> str:
    """Return an id that a step shares with its copies, and with no other save of its number."""
    return save or str(created_ns)


def is_step(step: int | None) -> bool:
    return step is None or step < MOST_STEPS


def peek_files(data: bytes) -> frozenset[str] | None:
    """Return the files that a `ckpt.json` names, itself among them; None if they are unknown.

    Example:
        ```python
        names = ckpt.manifest.peek_files(Path("runs/a/100/ckpt.json").read_bytes())
        ```
    """
    summary = peek(data)
    # A later format may name them in another way.
    return frozenset({FILE_NAME, *summary.sizes}) if summary and summary.files else None


def short_number(number: int) -> str:
    return str(number) if abs(number) < MOST_STEPS else "beyond all numbers"
