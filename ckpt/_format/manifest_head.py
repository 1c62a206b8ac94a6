"""The head of `ckpt.json`, from which lists of steps are made, and the check of the whole file.

This module needs no numpy, so that a list of a thousand steps takes only as long as reading their
heads.

Metrics of a step: values by name, in groups or not, as a manifest and JSON have them. Pure.
`{"train": {"loss": 0.5}}` stays as it is in the manifest, and Orbax finds it so. All code that
compares or shows metrics sees the numbers alone, in one level, with the name `train/loss`.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Protocol

import msgspec
import xxhash
from msgspec import Meta, Struct

from ckpt._arguments import shown
from ckpt.errors import InvalidArgumentError


class Digester(Protocol):
    """A digest that is taken piece by piece."""

    def update(self, data: bytes | bytearray | memoryview, /) -> None:
        """Add these bytes."""

    def hexdigest(self) -> str:
        """Return the digest of all of them, as `digest` would."""


def new_digest() -> Digester:
    return xxhash.xxh3_128()


def digest(data: bytes | bytearray | memoryview | mmap.mmap) -> str:
    """Return the xxh3_128 of `data` as 32 hex digits.

    Source: https://xxhash.com; a checksum against accidents, not against tampering.
    """
    return xxhash.xxh3_128_hexdigest(memoryview(data))


Step = Annotated[int, Meta(ge=0)]
# Note in a root that a run went back there: step numbers alone do not tell which step is newer.
WENT_BACK_NOTE = ".ckpt-run/went-back"
_Text = Annotated[str, Meta(pattern=r"^[^\x00-\x1f]{1,200}\Z")]
# Bounded as in the head of the manifest.
_Number = Annotated[int, Meta(ge=0, le=1 << 62)]
# Folder of a root to which a step is moved, so that its number can be saved anew; empty for none.
Aside = Literal["", "damaged", "unhealthy", "abandoned"]


@dataclass(frozen=True, slots=True)
class Parent:
    """The checkpoint that a run has begun from; a dataclass, as a part of the public `StepInfo`.

    Attributes:
        path: Path of the checkpoint.
        step: Its step, or None for a one-shot checkpoint.
        attempt: Id of the attempt that wrote it, which tells it from another checkpoint at that
            path.

    Example:
        ```python
        parent = ckpt.sync.metadata("runs/a/100").info.parent
        if parent is not None:
            print(parent.path, parent.step)
        ```
    """

    path: str
    step: Step | None
    attempt: str


class ReplacedSave(Struct, frozen=True, omit_defaults=True):
    """A save of the same step that gives way to this one wherever the step is copied to.

    Attributes:
        created_ns: Time at which it began, in Unix nanoseconds.
        committed_ns: Time of its commit, in Unix nanoseconds; all copies of it have both times.
        state: Why it is moved aside; empty for a save that is replaced.
    """

    created_ns: _Number
    committed_ns: _Number
    state: Aside = ""


@dataclass(frozen=True, slots=True)
class DroppedItem:
    """An item that was taken out of a committed step, whose other items stay.

    Attributes:
        item: Name of the item.
        dropped_ns: Time at which it was taken out, in Unix nanoseconds.
        policy: The policy that did not keep it, as text; None if it was deleted by hand.
        nbytes: Bytes of its files.

    Example:
        ```python
        for each in ckpt.sync.metadata("runs/a/100").info.dropped:
            print(each.item, each.dropped, each.policy or "by hand")
        ```
    """

    item: str
    dropped_ns: _Number
    policy: _Text | None = None
    nbytes: _Number = 0

    @property
    def dropped(self) -> datetime:
        """Time at which it was taken out (UTC)."""
        return datetime.fromtimestamp(self.dropped_ns / 1e9, UTC)

    def __str__(self) -> str:
        when = f"{self.dropped:%Y-%m-%d %H:%M:%S} UTC"
        if self.policy is None:
            return f"deleted by hand on {when}"
        return f"dropped on {when} by {self.policy}"


class _KnownSave(Protocol):
    """One save, as a manifest or a list of steps describes it."""

    @property
    def attempt(self) -> str: ...
    @property
    def created_ns(self) -> int: ...
    @property
    def committed_ns(self) -> int: ...
    @property
    def dropped(self) -> Sequence[DroppedItem]: ...


def is_same_save(found: _KnownSave, known: _KnownSave) -> bool:
    """Return True if `found` is the save `known`, with all of its items or without some.

    A step that loses an item is published anew, as another attempt with the old times.
    """
    if found.attempt == known.attempt:
        return True
    times = (found.created_ns, found.committed_ns)
    return len(found.dropped) > len(known.dropped) and times == (
        known.created_ns,
        known.committed_ns,
    )


class _ListedSave(Protocol):
    @property
    def step(self) -> int: ...
    @property
    def created_ns(self) -> int: ...
    @property
    def left_behind(self) -> Sequence[int]: ...


def left_behind(saves: Iterable[_ListedSave]) -> set[int]:
    """Return the start times of the saves that a run went back behind: a branch that was given up.

    Each save names the saves of greater steps that were there and that its run had not gone on
    from. A step that no smaller existing step names counts by its number, as do all steps if
    nothing is known. So the smallest step is never in the result.
    """
    found, named = set(), set[int]()
    for each in sorted(saves, key=lambda save: save.step):
        if each.created_ns in named:
            found.add(each.created_ns)
        named.update(each.left_behind)
    return found


def check_dropped(dropped: Sequence[DroppedItem], items: Collection[str]) -> None:
    """Check that no item is both there and dropped, and that none is dropped twice.

    Raises:
        ValueError: An item is.
    """
    names = [each.item for each in dropped]
    twice = next((name for name in names if name in items or names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"it says of the item {twice!r:.120} in two places what became of it")


# JSON has no NaN and no infinities, so they are texts. Other texts, and lists, are kept as they
# are. The depth is bounded, so that a forged file cannot nest without end.
_Row = list[float | str]
_Rows = list[float | str | _Row]
Value = float | str | list[float | str | _Rows]
_Third = dict[str, Value]
_Second = dict[str, Value | _Third]
_First = dict[str, Value | _Second]
Metrics = dict[str, Value | _First]
_MOST_LEVELS = 4
_MOST_LISTS = 3
_NOT_FINITE = ("nan", "inf", "-inf")


def flat_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the metrics by name, with `/` between the names of groups.

    Values that are not numbers are left out.

    Example:
        ```python
        flat = ckpt.manifest.flat_metrics({"train": {"loss": 0.5}, "seen": "nan"})
        assert flat["train/loss"] == 0.5
        ```
    """
    leaves = _leaves(metrics or {}, "", _MOST_LEVELS)
    return {name: float(value) for name, value in leaves if _is_number(value)}


def other_metrics(metrics: Mapping[str, Any] | None) -> list[str]:
    """Return the names of metrics that cannot be kept, which only other programs write."""
    leaves = _leaves(metrics or {}, "", _MOST_LEVELS)
    return [name for name, value in leaves if not _is_kept(value)]


def _is_kept(value: Any) -> bool:
    with contextlib.suppress(InvalidArgumentError):
        _plain_value(value, "", _MOST_LISTS)
        return True
    return False


def _is_number(value: object) -> bool:
    if isinstance(value, int | float) and not isinstance(value, bool):
        # A greater integer is not a float.
        return abs(value) <= sys.float_info.max or not isinstance(value, int)
    return isinstance(value, str) and value in _NOT_FINITE


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as a manifest has them; waits for jax scalars that are being computed.

    Raises:
        InvalidArgumentError: A value is neither a number nor a text nor a list of those, two
            metrics have the same name, or groups or lists are nested too deeply.
    """
    plain = _plain(metrics, "", _MOST_LEVELS)
    names: set[str] = set()
    for name, _ in _leaves(plain, "", _MOST_LEVELS):
        if name in names:
            raise InvalidArgumentError(
                f"metrics: two of them have the name {shown(name)}, since groups and their names "
                "are joined by '/'"
            )
        names.add(name)
    return plain


def copied_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy, groups and lists included, of metrics that are not yet checked."""
    return {name: _copied(value) for name, value in metrics.items()}


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return copied_metrics(value)
    return [_copied(each) for each in value] if isinstance(value, list | tuple) else value


def json_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics of a manifest as they were passed, in the form of Python's `json`.

    Values that only other programs write, such as null, are left out.
    """
    found = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping) or _is_kept(value):
            found[name] = _passed(value)
    return found


def _passed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return json_metrics(value)
    if isinstance(value, list):
        return [_passed(each) for each in value]
    return float(value) if isinstance(value, str) and value in _NOT_FINITE else value


def grouped_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return metrics of a manifest as they were passed, unless all are numbers in one level."""
    found = json_metrics(metrics or {})
    return None if all(isinstance(each, int | float) for each in found.values()) else found


def _plain(metrics: Mapping[str, Any], above: str, levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        path = f"{above}{name}"
        if str(name) in found:
            raise InvalidArgumentError(f"metrics: two of them have the name {shown(path)}")
        if isinstance(value, Mapping):
            if levels == 1:
                raise InvalidArgumentError(
                    f"metrics[{shown(path)}]: groups are nested in more than {_MOST_LEVELS} levels"
                )
            found[str(name)] = _plain(value, f"{path}/", levels - 1)
        else:
            found[str(name)] = _plain_value(value, path, _MOST_LISTS)
    return found


def _plain_value(value: Any, path: str, levels: int) -> Any:
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list | tuple) and levels:
        return [_plain_value(each, path, levels - 1) for each in value]
    try:
        number = float(value)
    except Exception as error:
        # jax may raise anything, too: a donated array has no value.
        what = f"{type(value).__name__}: {error!s:.200}"
        with contextlib.suppress(Exception):
            what = shown(value)
        raise InvalidArgumentError(
            f"metrics[{shown(path)}]={what}: expected a number, a text, or a list or dict of them"
        ) from error
    return number if number - number == 0 else repr(number)


def _leaves(metrics: Mapping[str, Any], above: str, levels: int) -> Iterator[tuple[str, Any]]:
    for name, value in metrics.items():
        if not isinstance(value, Mapping):
            yield f"{above}{name}", value
        elif levels > 1:
            yield from _leaves(value, f"{above}{name}/", levels - 1)


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
        extensions: What extensions say of the whole step, by name.
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
    extensions: dict[str, Any] = {}
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


class _EarlierSummary(Summary, frozen=True, kw_only=True):
    """A summary by any writer; earlier ones had the counts of their only extension beside it."""

    nonfinite_leaves: Size | None = None
    unequal_leaves: Size = 0

    def __post_init__(self) -> None:
        if self.nonfinite_leaves is not None or self.unequal_leaves:
            counts = {name: getattr(self, name) for name in ("nonfinite_leaves", "unequal_leaves")}
            self.extensions.setdefault("vital_signs", counts)


# Made once, before there are threads: msgspec analyses a type that contains dataclasses at its
# first use, and two threads that do so at the same time can crash the interpreter.
SUMMARIES: msgspec.json.Decoder[Summary] = msgspec.json.Decoder(_EarlierSummary)


class Origin(Struct, frozen=True):
    """The writer of a step and the notes of its run, as attributes of `Manifest`."""

    writer: dict[str, str]
    process_count: int
    extensions: dict[str, Any] = {}


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
