"""`ckpt.json`: the manifest of a step, its models and its bytes.

A step is committed if and only if its manifest is there and whole. The file is one JSON object; its
last member is a checksum of every byte before it, so that a cut or changed manifest is recognized
without parsing it, and any JSON tool can still read it. `docs/format.md` is the specification;
readers ignore unknown fields and refuse unknown entries of `requires`.

This module needs neither jax nor tensorstore, so that tools can read manifests in a few
milliseconds.
"""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field
from pydantic import JsonValue as JsonValue

from ckpt._format.digests import digest
from ckpt.errors import CorruptCheckpointError, InvalidArgumentError, UnsupportedFormatError

FILE_NAME = "ckpt.json"
FORMAT_VERSION = 1
# Chunks may be compressed.
COMPRESSION = "compression"
# The files may be in a folder of the step directory.
FOLDER = "folder"
# Other processes have other chunks of the arrays, on disks of their own.
OWN_DISKS = "own_disks"
SUPPORTED_FEATURES: frozenset[str] = frozenset({COMPRESSION, FOLDER, OWN_DISKS})
# A manifest takes about 250 bytes a leaf, so this is room for a million leaves; a larger file is
# refused before it is parsed.
MAX_BYTES = 256 << 20

# The JSON parser stops at about 200 levels; half of them are left to the structures around it.
MAX_METADATA_DEPTH = 100

_TRAILER_KEY = b',"checksum":"xxh3_128:'
_TRAILER_END = b'"}\n'
_HEX_DIGITS = 32


# Bounded, so that no number in a file can make a message endless or a date impossible.
Version = Annotated[int, Field(gt=-(10**40), lt=10**40)]
Step = Annotated[int, Field(ge=0, lt=10**19)]
Size = Annotated[int, Field(ge=0, le=1 << 62)]
UnixTime = Annotated[int, Field(ge=0, le=1 << 62)]
# A name from a file: it must not point anywhere else.
Folder = Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")]
Seconds = Annotated[float, Field(ge=0, lt=1e12)]
Metrics = dict[str, float | Literal["nan", "inf", "-inf"]]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class Node(_Model):
    """One inner node of an item's tree; node 0 is the root.

    Attributes:
        kind: `dict`, `ordered_dict`, `default_dict`, `list`, `tuple`, `namedtuple`, `none` or
            `custom` (a class registered with `jax.tree_util`).
        keys: For mappings the keys in their own order, for namedtuples and custom nodes the field
            names. A string or integer key stands for itself; other keys are `{"type": value}`.
        children: A number `n >= 0` is leaf `n`, a number `-n` is node `n`.
        class_name: `module:qualified name` for namedtuples and custom nodes; the factory of a
            `default_dict`. It is compared with classes the process already has, never imported.
        static: What a custom node keeps beside its children: `{"fields": {name: value}}` of a
            dataclass, else `{"aux": value}` as its class gives it to jax; values as dict keys.
        unstored: Names of the fields, or `aux`, that could not be stored.
    """

    kind: str
    keys: list[JsonValue] = Field(default_factory=list)
    children: list[int] = Field(default_factory=list)
    class_name: str | None = None
    static: JsonValue = None
    unstored: list[str] = Field(default_factory=list)


class ShardingEntry(_Model):
    """How an array was placed on devices; enough to rebuild the sharding where they exist.

    Attributes:
        kind: `named`, `single` or `other` (kept as text only).
        platform: Platform of the devices, e.g. `cpu`.
        device_ids: Ids of the devices, in mesh order.
        memory_kind: Memory kind of the sharding, or None for the default.
        axis_names: Mesh axis names (`named` only).
        axis_sizes: Mesh axis sizes (`named` only).
        axis_types: Mesh axis types, e.g. `Auto` (`named` only).
        spec: Partition spec: for every dimension None, an axis name or a list of them.
        text: The device as jax prints it (`single`), or the sharding's `repr` (`other`).
    """

    kind: str
    platform: str
    device_ids: list[int] = Field(default_factory=list)
    memory_kind: str | None = None
    axis_names: list[str] = Field(default_factory=list)
    axis_sizes: list[int] = Field(default_factory=list)
    axis_types: list[str] = Field(default_factory=list)
    spec: list[str | list[str] | None] = Field(default_factory=list)
    text: str | None = None


class LeafEntry(_Model):
    """One leaf.

    Attributes:
        name: The stored name (escaped leaf path); its keys in the database begin with `<name>/`.
        kind: `jax`, `key` (a typed PRNG key, stored as its key data), `numpy`, `numpy_scalar`; a
            scalar kept in `value`: `int`, `float`, `complex`, `bool`, `str`, `bytes`,
            `numpy_str`, `numpy_bytes`; or `callable`, of which only the name is stored.
        dtype: Logical dtype of an array leaf, e.g. `bfloat16`.
        shape: Global shape of an array leaf.
        chunks: Shape of one stored chunk; chunks tile the array from the origin.
        digests: xxh3_128 of the logical bytes (C order, little endian) of every chunk, in C order
            of the chunk grid. Of a chunk at the upper edge only the part inside the array counts.
            Empty for a chunk that another process keeps on a disk of its own.
        offsets: First byte of every chunk within its data file, in the order of `digests`.
        files: Index into the item's `data_files` of every chunk's file; empty where all are in
            the first.
        codec: What every chunk is encoded with, `zstd` or `blosc`; None for nothing.
        lengths: Bytes of every encoded chunk, in the order of `digests`; empty without a codec.
        packed: Whether the array is a single chunk that holds exactly its bytes (a small leaf).
        sharding: Index into the item's `shardings` (`jax` only).
        committed: Whether a jax array was bound to its place; jax may move one that was not.
        weak_type: Whether the array was weakly typed.
        impl: Name of the implementation of a PRNG key.
        same_as: Number of an earlier leaf that was the same array object; both have the same
            chunks at the same places.
        value: The value of a Python scalar (`int` and `float` as text, exactly; `bytes` base64).
    """

    name: str
    kind: str
    dtype: str | None = None
    shape: list[int] = Field(default_factory=list)
    chunks: list[int] = Field(default_factory=list)
    digests: list[str] = Field(default_factory=list)
    offsets: list[int] = Field(default_factory=list)
    files: list[int] = Field(default_factory=list)
    codec: str | None = None
    lengths: list[int] = Field(default_factory=list)
    packed: bool = False
    sharding: int | None = None
    committed: bool = True
    weak_type: bool = False
    impl: str | None = None
    same_as: int | None = None
    value: str | bool | None = None


class ItemEntry(_Model):
    """One item: a named top-level object of the step.

    Attributes:
        handler: Stable name of the handler that wrote it (never a Python path).
        nodes: The inner nodes of its tree; empty where the item is a single leaf.
        leaves: The leaves in the order of `jax.tree.leaves`.
        shardings: The distinct shardings of its arrays.
        data_files: The files that hold its chunks, as paths relative to the item.
        nbytes: Logical bytes of its arrays, or of the files that its handler keeps.
        data: What a handler other than the PyTree one keeps in the manifest.
    """

    handler: str
    nodes: list[Node] = Field(default_factory=list)
    leaves: list[LeafEntry] = Field(default_factory=list)
    shardings: list[ShardingEntry] = Field(default_factory=list)
    data_files: list[str] = Field(default_factory=list)
    nbytes: Size = 0
    data: JsonValue = None


class FileEntry(_Model):
    """Size in bytes and xxh3_128 of one file of the step."""

    size: Size
    digest: str


class Manifest(_Model):
    """Everything there is to know of a step without reading an array byte.

    Attributes:
        format: Always `ckpt`.
        version: Format version; a reader refuses one it does not know.
        requires: Names of features a reader must know to read the step.
        step: The step, or None for a one-shot checkpoint.
        attempt: Random id of the attempt that wrote the step.
        folder: Folder of the step directory that holds all files but the manifest: its name is the
            id of the attempt that wrote them. Empty where they are in the step directory itself.
        unnamed: Whether the step is one object saved without a name; it is the item
            `default`.
        items: The items by name.
        metrics: Metrics given to `save`; NaN and infinities as text, since JSON has none.
        metadata: User metadata given to `save`.
        created_ns: Unix time in nanoseconds at which the save began.
        committed_ns: Unix time in nanoseconds at which the manifest was written.
        writer: Versions of the libraries that wrote the step.
        process_count: Number of processes that wrote the step.
        save: Where each of them has a disk of its own: random id that its manifests have in common.
        statistics: Where the time of the save went until the manifest was written, in seconds.
        files: Every other file of the step, by path relative to it, or to `folder`.
    """

    format: Literal["ckpt"]
    version: Version
    requires: list[str] = Field(default_factory=list)
    step: Step | None
    attempt: str
    folder: Folder = ""
    unnamed: bool
    items: dict[str, ItemEntry]
    metrics: Metrics | None = None
    metadata: JsonValue = None
    created_ns: UnixTime
    committed_ns: UnixTime
    writer: dict[str, str]
    process_count: int
    save: str = ""
    statistics: dict[str, Seconds] = Field(default_factory=dict)
    files: dict[str, FileEntry]

    @property
    def sizes(self) -> dict[str, int]:
        """The size in bytes of every file but the manifest, by path in the step directory."""
        return _sizes(self.folder, self.files)


class _Header(_Model):
    """The part that decides whether the rest may be read at all."""

    format: str
    version: Version
    requires: list[str] = Field(default_factory=list)
    step: Step | None = None


class Summary(_Header):
    """What lists of steps are made of. Attributes as in `Manifest`."""

    attempt: str = ""
    save: str = ""
    metrics: Metrics | None = None
    created_ns: UnixTime = 0
    committed_ns: UnixTime = 0
    files: dict[str, FileEntry] = Field(default_factory=dict)
    folder: Folder = ""

    @property
    def sizes(self) -> dict[str, int]:
        """The size in bytes of every file but the manifest, by path in the step directory."""
        return _sizes(self.folder, self.files)


def _sizes(folder: str, files: dict[str, FileEntry]) -> dict[str, int]:
    start = f"{folder}/" if folder else ""
    return {start + path: each.size for path, each in files.items()}


def encode(manifest: Manifest) -> bytes:
    """Return the bytes of `ckpt.json` for `manifest`, checksum included.

    Raises:
        InvalidArgumentError: The user's metadata, or a text in it, cannot be written as JSON.

    Example:
        ```python
        data = ckpt.manifest.encode(manifest)
        assert ckpt.manifest.is_whole(data)
        ```
    """
    if _deeper_than(manifest.metadata, MAX_METADATA_DEPTH):
        raise InvalidArgumentError(
            f"the metadata is nested deeper than {MAX_METADATA_DEPTH} levels", step=manifest.step
        )
    try:
        # Fields at their defaults are left out: for thousands of small leaves that halves the file.
        body = manifest.model_dump_json(exclude_defaults=True).encode()[:-1]
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"the step cannot be described in JSON: {error!s:.200}", step=manifest.step
        ) from error
    return body + _TRAILER_KEY + digest(body).encode() + _TRAILER_END


def sizes(manifest: Manifest, encoded: bytes) -> dict[str, int]:
    """Return the size in bytes of every file of a step by path, its manifest among them."""
    return {FILE_NAME: len(encoded)} | {path: each.size for path, each in manifest.files.items()}


def is_whole(data: bytes) -> bool:
    """Tell whether `data` is a complete, unchanged `ckpt.json`, without parsing it.

    Example:
        ```python
        data = Path("runs/a/100/ckpt.json").read_bytes()
        assert ckpt.manifest.is_whole(data)
        ```
    """
    split = len(data) - len(_TRAILER_KEY) - _HEX_DIGITS - len(_TRAILER_END)
    if split < 0 or not data.startswith(_TRAILER_KEY, split):
        return False
    # Without a copy of the body, which may be large.
    found = digest(memoryview(data)[:split]).encode()
    return data.endswith(_TRAILER_KEY + found + _TRAILER_END)


def peek(data: bytes) -> Summary | None:
    """Return the summary of a `ckpt.json`; None if it is not whole or not a manifest.

    A manifest of a later format has one, too, though this library cannot read the rest.

    Example:
        ```python
        summary = ckpt.manifest.peek(Path("runs/a/100/ckpt.json").read_bytes())
        assert summary is not None and summary.step == 100
        ```
    """
    if not is_whole(data):
        return None
    try:
        return Summary.model_validate_json(data)
    except pydantic.ValidationError:
        pass
    try:
        header = _Header.model_validate_json(data)
    except pydantic.ValidationError:
        return None
    return Summary(format=header.format, version=header.version, step=header.step)


def peek_files(data: bytes) -> frozenset[str] | None:
    """Return the files that a `ckpt.json` names, itself among them; None if that is not known.

    Example:
        ```python
        names = ckpt.manifest.peek_files(Path("runs/a/100/ckpt.json").read_bytes())
        ```
    """
    summary = peek(data)
    # A later format may name them in another way.
    return frozenset({FILE_NAME, *summary.sizes}) if summary and summary.files else None


def decode(data: bytes, *, where: str) -> Manifest:
    """Return the manifest whose bytes are `data`.

    Args:
        data: Content of a `ckpt.json`.
        where: The file's path, for messages.

    Raises:
        CorruptCheckpointError: The bytes are cut, changed, or not a manifest.
        UnsupportedFormatError: The manifest is of a later format.

    Example:
        ```python
        path = Path("runs/a/100/ckpt.json")
        manifest = ckpt.manifest.decode(path.read_bytes(), where=str(path))
        ```
    """
    if not is_whole(data):
        raise CorruptCheckpointError(
            f"{where}: the manifest is cut short or was changed after it was written "
            f"({len(data)} bytes; its checksum does not fit). Restore another step."
        )
    try:
        manifest = Manifest.model_validate_json(data)
    except MemoryError as error:
        raise CorruptCheckpointError(
            f"{where}: the manifest has {len(data)} bytes, and there is not enough memory for it"
        ) from error
    except pydantic.ValidationError as error:
        # What is invalid for this version may be valid in a later one.
        _refuse_later_formats(data, where)
        raise CorruptCheckpointError(f"{where}: not a valid manifest: {_summary(error)}") from error
    if manifest.version != FORMAT_VERSION or not SUPPORTED_FEATURES.issuperset(manifest.requires):
        _refuse_later_formats(data, where)
    return manifest


def _refuse_later_formats(data: bytes, where: str) -> None:
    try:
        header = _Header.model_validate_json(data)
    except pydantic.ValidationError as error:
        raise CorruptCheckpointError(f"{where}: not a manifest: {_summary(error)}") from error
    unknown = sorted(set(header.requires) - SUPPORTED_FEATURES)
    if header.format != "ckpt" or header.version != FORMAT_VERSION or unknown:
        raise UnsupportedFormatError(
            f"{where}: format {header.format!r:.40} version {header.version}"
            + (f" needing {len(unknown)} features such as {unknown[0]!r:.60}" if unknown else "")
            + f"; this library reads 'ckpt' version {FORMAT_VERSION}. Update the library."
        )


def _summary(error: pydantic.ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(f"{part!s:.60}" for part in first["loc"][:8]) or "document"
    return f"{place}: {first['msg']:.300} ({error.error_count()} in all)"


def _deeper_than(value: JsonValue, depth: int) -> bool:
    level = [value]
    for _ in range(depth + 1):
        level = [
            child
            for each in level
            if isinstance(each, list | dict)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True
