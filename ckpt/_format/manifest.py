"""`ckpt.json`: the manifest of a step, its models and its bytes.

A step is committed if and only if its manifest is there and whole. The file is one JSON object in
two parts. Lists of steps are made from the *head*: it is small, has a checksum of its own, and says
how long the rest is, so that it can be read alone. The rest describes the items, whose leaves are
columns (see `leaf_table`). The last member is a checksum of every byte before it, so that a cut or
changed manifest is recognized without parsing it, and any JSON tool can still read it.
`docs/reference/format.md` is the specification; readers ignore unknown fields and refuse unknown
entries of `requires`.

This module needs neither jax nor tensorstore, so that tools can read manifests in a few
milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from ckpt._format.leaf_table import LeafColumns, LeafTable
from ckpt._format.manifest_head import (
    COMPRESSION,
    FILE_NAME,
    FOLDER,
    FORMAT_VERSION,
    HEAD_KEY,
    HEX_DIGITS,
    INVALID,
    OWN_DISKS,
    OWN_FORMAT,
    SUMMARIES,
    SUPPORTED_FEATURES,
    TRAILER_END,
    TRAILER_KEY,
    VIRTUAL,
    DroppedItem,
    FileEntry,
    Metrics,
    Parent,
    ReplacedSave,
    Size,
    Summary,
    check_dropped,
    digest,
    is_step,
    is_whole,
    short_number,
    sizes_in,
    split_head,
    tops_of,
    version_of,
)
from ckpt._format.step_files import SourceFile
from ckpt.errors import CorruptCheckpointError, InvalidArgumentError, UnsupportedFormatError

# The JSON parser stops at about 200 levels; half of them are left to the structures around it.
MAX_METADATA_DEPTH = 100

JsonValue = Any
# A name from a file must not point anywhere else.
DataFile = Annotated[str, Meta(pattern=r"^d/[0-9a-f]{32}\Z")]
Seconds = Annotated[float, Meta(ge=0, lt=1e12)]


class Node(Struct, frozen=True, omit_defaults=True):
    """One inner node of an item's tree; node 0 is the root.

    Attributes:
        kind: `dict`, `ordered_dict`, `default_dict`, `list`, `tuple`, `namedtuple`, `none` or
            `custom` (a class registered with `jax.tree_util`).
        keys: For mappings the keys in their own order, for namedtuples and custom nodes the field
            names. A string or integer key stands for itself; other keys are `{"type": value}`.
        children: A number `n >= 0` is leaf `n`, a number `-n` is node `n`.
        class_name: `module:qualified name` for namedtuples and custom nodes; the factory of a
            `default_dict`. It is compared with classes the process already has, never imported.
        static: Data of a custom node beside its children: `{"fields": {name: value}}` of a
            dataclass, else `{"aux": value}` as its class gives it to jax; values as dict keys.
        unstored: Names of the fields, or `aux`, that could not be stored.
    """

    kind: str
    keys: list[JsonValue] = []
    children: list[int] = []
    class_name: str | None = None
    static: JsonValue = None
    unstored: list[str] = []


class ShardingEntry(Struct, frozen=True, omit_defaults=True):
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
    device_ids: list[int] = []
    memory_kind: str | None = None
    axis_names: list[str] = []
    axis_sizes: list[int] = []
    axis_types: list[str] = []
    spec: list[str | list[str] | None] = []
    text: str | None = None


class ItemEntry(Struct, frozen=True):
    """One item: a named top-level object of the step.

    Attributes:
        handler: Stable name of the handler that wrote it (never a Python path).
        nodes: The inner nodes of its tree; empty where the item is a single leaf.
        leaves: The leaves in the order of `jax.tree.leaves`.
        shardings: The distinct shardings of its arrays.
        data_files: The files that hold its chunks, as paths relative to the item.
        nbytes: Logical bytes of its arrays, or of the files that its handler keeps.
        data: Data that a handler other than the PyTree one keeps in the manifest.
    """

    handler: str
    nodes: list[Node] = []
    leaves: LeafTable = field(default_factory=LeafTable)
    shardings: list[ShardingEntry] = []
    data_files: list[str] = []
    nbytes: Size = 0
    data: JsonValue = None


class Manifest(Struct, frozen=True):
    """All that is known of a step without reading an array byte.

    Attributes:
        format: `ckpt`; another name for a checkpoint that another library wrote.
        version: Format version; a reader refuses versions that it does not know.
        requires: Names of features a reader must know to read the step.
        step: The step, or None for a one-shot checkpoint.
        attempt: Random id of the attempt that wrote the step.
        folder: Folder of the step directory that holds all files but the manifest: its name is the
            id of the attempt that wrote them. Empty where they are in the step directory itself.
        unnamed: True if the step is one object saved without a name; it is the item `default`.
        items: The items by name.
        metrics: Metrics given to `save`, in groups if they were given so; NaN and infinities as
            text, since JSON has none. `flat_metrics` returns those that are numbers.
        metadata: User metadata given to `save`.
        parent: The checkpoint that the run began from, or None.
        replaces: Saves of the same step that give way to this one wherever it is copied to.
        left_behind: Start times, in Unix nanoseconds, of the saves of greater steps that were there
            and that its run had not gone on from.
        created_ns: Unix time in nanoseconds at which the save began.
        committed_ns: Unix time in nanoseconds at which the manifest was written.
        writer: Versions of the libraries that wrote the step.
        process_count: Number of processes that wrote the step.
        save: Random id that the manifests of all processes share, where each has a disk of its own.
        statistics: Seconds that the parts of the save took until the manifest was written.
        files: Every other file of the step, by path relative to it, or to `folder`.
        sources: The data files that are not in the step, by the path that they would have there.
        dropped: The items that were taken out of the step after it was committed.
        extensions: What extensions say of the whole step, by name; see `LeafTable.extensions`.
    """

    format: str
    version: int
    step: int | None
    attempt: str
    unnamed: bool
    items: dict[str, ItemEntry]
    created_ns: int
    committed_ns: int
    writer: dict[str, str]
    process_count: int
    files: dict[str, FileEntry]
    requires: list[str] = []
    folder: str = ""
    metrics: Metrics | None = None
    metadata: JsonValue = None
    parent: Parent | None = None
    replaces: list[ReplacedSave] = []
    left_behind: list[int] = []
    save: str = ""
    statistics: dict[str, float] = {}
    sources: dict[str, SourceFile] = {}
    dropped: list[DroppedItem] = []
    extensions: dict[str, Any] = {}

    @property
    def sizes(self) -> dict[str, int]:
        """The size in bytes of every file but the manifest, by path in the step directory."""
        return sizes_in(self.folder, self.files)


def _fileless(items: Iterable[str], files: Iterable[str]) -> list[str]:
    tops = tops_of(files)
    return [name for name in items if name not in tops]


class _Item(Struct, frozen=True, omit_defaults=True):
    """An item as it is in the file."""

    handler: str
    nodes: list[Node] = []
    leaves: LeafColumns | None = None
    shardings: list[ShardingEntry] = []
    data_files: list[DataFile] = []
    nbytes: Size = 0
    data: JsonValue = None


class _Rest(Struct, frozen=True, omit_defaults=True):
    """The part of a manifest after the head."""

    unnamed: bool
    items: dict[str, _Item]
    writer: dict[str, str]
    process_count: int
    metadata: JsonValue = None
    parent: Parent | None = None
    statistics: dict[str, Seconds] = {}
    sources: dict[str, SourceFile] = {}
    replaces: list[ReplacedSave] = []


# Made once, like the decoder of the head.
_RESTS = msgspec.json.Decoder(_Rest)


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
    # Fields at their defaults are left out.
    rest = _Rest(
        manifest.unnamed,
        {name: _written(item) for name, item in manifest.items.items()},
        manifest.writer,
        manifest.process_count,
        manifest.metadata,
        manifest.parent,
        manifest.statistics,
        manifest.sources,
        manifest.replaces,
    )
    try:
        tail = msgspec.json.encode(rest)[1:-1]
        head = Summary(
            manifest.format,
            manifest.version,
            manifest.requires,
            manifest.step,
            manifest.attempt,
            manifest.save,
            manifest.metrics,
            manifest.created_ns,
            manifest.committed_ns,
            manifest.folder,
            manifest.files,
            manifest.extensions,
            manifest.dropped,
            _fileless(manifest.items, manifest.files),
            manifest.left_behind,
            # The comma before it, and the trailer after it.
            1 + len(tail) + len(TRAILER_KEY) + HEX_DIGITS + len(TRAILER_END),
        )
        front = msgspec.json.encode(head)[:-1]
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidArgumentError(
            f"the step cannot be described in JSON: {error!s:.200}", step=manifest.step
        ) from error
    body = b"".join((front, HEAD_KEY, digest(front).encode(), b'",', tail))
    return b"".join((body, TRAILER_KEY, digest(body).encode(), TRAILER_END))


def _written(item: ItemEntry) -> _Item:
    leaves = item.leaves.columns() if len(item.leaves) else None
    return _Item(
        item.handler, item.nodes, leaves, item.shardings, item.data_files, item.nbytes, item.data
    )


def _read(item: _Item) -> ItemEntry:
    leaves = LeafTable() if item.leaves is None else LeafTable.read(item.leaves)
    return ItemEntry(
        item.handler, item.nodes, leaves, item.shardings, item.data_files, item.nbytes, item.data
    )


def encode_item(item: ItemEntry) -> bytes:
    """Return the bytes of one item of a manifest.

    Raises:
        ValueError: A text in it cannot be written as JSON.

    Example:
        ```python
        item = manifest.items["default"]
        assert ckpt.manifest.decode_item(ckpt.manifest.encode_item(item)) == item
        ```
    """
    return msgspec.json.encode(_written(item))


def decode_item(data: bytes) -> ItemEntry:
    """Return the item whose bytes are `data`; see `encode_item`.

    Raises:
        ValueError: `data` is not an item.

    Example:
        ```python
        item = manifest.items["default"]
        assert ckpt.manifest.decode_item(ckpt.manifest.encode_item(item)) == item
        ```
    """
    try:
        return _read(msgspec.json.decode(data, type=_Item))
    except INVALID as error:
        raise ValueError(f"not an item of a manifest: {error!s:.300}") from error


def of_item(manifest: Manifest, item: str) -> Manifest:
    """Return a manifest of one item alone, as if it were a state without a name."""
    files, sources = (
        {path: each for path, each in listed.items() if path.startswith(f"{item}/")}
        for listed in (manifest.files, manifest.sources)
    )
    items = {item: manifest.items[item]}
    alone = replace(manifest, unnamed=True, items=items, files=files, sources=sources)
    # What extensions say of the step is of all items.
    return replace(alone, dropped=(), extensions={})


def sizes(manifest: Manifest, encoded: bytes) -> dict[str, int]:
    """Return the size in bytes of every file of a step by path, its manifest among them."""
    return {FILE_NAME: len(encoded)} | {path: each.size for path, each in manifest.files.items()}


def features(
    items: Mapping[str, ItemEntry], folder: str, *, own_disks: bool = False, virtual: bool = False
) -> list[str]:
    """Return the features that a reader has to know."""
    compressed = any(
        form.codec is not None for item in items.values() for form in item.leaves.forms
    )
    needed = {COMPRESSION: compressed, FOLDER: folder, OWN_DISKS: own_disks, VIRTUAL: virtual}
    return [name for name, is_needed in needed.items() if is_needed]


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
    head, end = split_head(data)
    if head is None:
        raise _not_ours(data, where, "it has no head")
    try:
        front = SUMMARIES.decode(head)
        is_ours = front.format == OWN_FORMAT and front.version == FORMAT_VERSION
        if not is_ours or not SUPPORTED_FEATURES.issuperset(front.requires):
            raise _not_ours(head, where, "")
        if not is_step(front.step) or len(data) != end + front.rest:
            raise ValueError("its head contradicts it")
        rest = _RESTS.decode(b"".join((b"{", memoryview(data)[end + 1 :])))
        items = {name: _read(item) for name, item in rest.items.items()}
        manifest = Manifest(
            format=front.format,
            version=front.version,
            requires=front.requires,
            step=front.step,
            attempt=front.attempt,
            folder=front.folder,
            unnamed=rest.unnamed,
            items=items,
            metrics=front.metrics,
            metadata=rest.metadata,
            parent=rest.parent,
            replaces=rest.replaces,
            left_behind=front.left_behind,
            created_ns=front.created_ns,
            committed_ns=front.committed_ns,
            writer=rest.writer,
            process_count=rest.process_count,
            save=front.save,
            statistics=rest.statistics,
            files=front.files,
            sources=rest.sources,
            dropped=front.dropped,
            extensions=front.extensions,
        )
        # Earlier writers did not name such items.
        if front.fileless and front.fileless != _fileless(items, front.files):
            raise ValueError("its head names other items without files")
        check_dropped(front.dropped, items)
        if OWN_DISKS not in front.requires:
            _check_places(items)
        if VIRTUAL not in front.requires:
            _check_whole(items, rest.sources)
    except MemoryError as error:
        raise CorruptCheckpointError(
            f"{where}: the manifest has {len(data)} bytes, and there is not enough memory for it"
        ) from error
    except INVALID as error:
        # Values that are invalid in this version may be valid in a later one.
        raise _not_ours(head, where, f"{error!s:.300}") from error
    return manifest


def _check_whole(items: Mapping[str, ItemEntry], sources: Mapping[str, SourceFile]) -> None:
    """Check that a step that is not virtual has all of its files, and the digests of all chunks.

    Raises:
        ValueError: Files or digests are missing.
    """
    if sources or any(len(item.leaves.unchecked()) for item in items.values()):
        raise ValueError(f"it needs files of others, or lacks digests, and is not {VIRTUAL!r}")


def _check_places(items: Mapping[str, ItemEntry]) -> None:
    """Check that every chunk of a step that is in one place has an offset.

    Raises:
        ValueError: A chunk has none.
    """
    for name, item in items.items():
        table = item.leaves
        absent = np.flatnonzero(table.offsets < 0)
        if len(absent):
            number = int(np.searchsorted(table.firsts, absent[0], side="right")) - 1
            raise ValueError(
                f"it does not say where the chunks of {table.names[number]!r:.200} of the item "
                f"{name!r:.200} are"
            )


def _not_ours(data: bytes, where: str, reason: str) -> CorruptCheckpointError:
    """Return the error for a manifest that is not of this version, or invalid for `reason`.

    Raises:
        UnsupportedFormatError: The manifest is of a later format.
    """
    found = version_of(data)
    if found is None:
        return CorruptCheckpointError(f"{where}: not a manifest: {reason}")
    unknown = sorted(set(found.requires) - SUPPORTED_FEATURES)
    if found.format != "ckpt" or found.version != FORMAT_VERSION or unknown:
        raise UnsupportedFormatError(
            f"{where}: format {found.format!r:.40} version {short_number(found.version)}"
            + (f" needing {len(unknown)} features such as {unknown[0]!r:.60}" if unknown else "")
            + f"; this library reads 'ckpt' version {FORMAT_VERSION}. Update the library."
        )
    return CorruptCheckpointError(f"{where}: not a valid manifest: {reason}")


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
