"""OCDBT databases over data files that exist already.

TensorStore's OCDBT format keeps a B+tree of keys whose values are inline in a tree node or anywhere
in a data file. The specification allows data files of any relative path. So write batches are plain
files, and a `DatabaseIndex`, which lists where every value is, makes them a database for
TensorStore, zarr tools and Orbax. Everything but the names of the files depends only on the
structure of the saved tree, so an index is encoded once for all saves of the same structure.

Source: https://google.github.io/tensorstore/kvstore/ocdbt/index.html, "Storage format".
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import pairwise

import google_crc32c
import numpy as np
from msgspec import Struct

from ckpt._format.array_format import MAX_KEY_BYTES

_MANIFEST_MAGIC = 0x0CDB3A2A
_NODE_MAGIC = 0x0CDB20DE
_UNCOMPRESSED = b"\x00"
_FORMAT_VERSION = b"\x00"
# The configuration with which Orbax opens its databases; it only matters for writing to one.
_MAX_INLINE_VALUE_BYTES = 1024
_MAX_DECODED_NODE_BYTES = 100_000_000
_VERSION_TREE_ARITY_LOG2 = 4
# A reader that wants a single key decodes one node of every level, so nodes are kept small.
_NODE_ENTRIES = 8192
_NODE_INLINE_BYTES = 2 << 20


class KeyValue(Struct, frozen=True, gc=False):
    """One key of a database: the value is inline, or `length` bytes at `offset` in a data file."""

    key: bytes
    inline: bytes | None = None
    file: int = 0
    offset: int = 0
    length: int = 0


class Database(Struct, frozen=True):
    """The bytes that make data files a database.

    Attributes:
        tree: Content of the file that holds the tree nodes.
        manifest: Content of `manifest.ocdbt`.
        manifest_above: Content of a `manifest.ocdbt` in the folder above, for the same database.
    """

    tree: bytes
    manifest: bytes
    manifest_above: bytes


class _Node(Struct, frozen=True):
    """A tree node without the names of its data files.

    Attributes:
        height: 0 for a leaf node.
        first: Its first key.
        columns: Its entries, encoded.
        keys: Number of keys below it.
        indirect: Bytes of the values below it that are in data files.
    """

    height: int
    first: bytes
    columns: bytes
    keys: int
    indirect: int


class _Placed(Struct, frozen=True):
    """A node in the tree's file; `tree_bytes` counts the bytes of it and of all nodes below it."""

    node: _Node
    offset: int
    length: int
    tree_bytes: int


class DatabaseIndex:
    """The keys of one database, encoded but for the names of its files."""

    def __init__(self, entries: Iterable[KeyValue]) -> None:
        """Index `entries`, in any order and with different keys.

        Raises:
            ValueError: There are no entries, two have the same key, or a key is too long.
        """
        ordered = sorted(entries, key=lambda entry: entry.key)
        if not ordered:
            raise ValueError("an index without entries")
        longest = max(len(entry.key) for entry in ordered)
        if longest > MAX_KEY_BYTES:
            raise ValueError(f"a key of {longest} bytes; a database holds up to {MAX_KEY_BYTES}")
        if any(a.key == b.key for a, b in pairwise(ordered)):
            raise ValueError("two entries with one key")
        self._leaves = [_leaf_node(batch) for batch in _batches(ordered)]

    def encode(
        self, files: Sequence[str], tree_file: str, uuid: bytes, created_ns: int, folder: str = ""
    ) -> Database:
        """Return the database for data files of these names.

        Args:
            files: Path of every data file, relative to the database, by its number in the entries.
            tree_file: Path of the file that will hold the tree nodes.
            uuid: Sixteen bytes that name the database.
            created_ns: Unix time in nanoseconds.
            folder: Name of the folder of the database.
        """
        tree = bytearray()
        table = _file_table(files)
        level = [_append(tree, node, table) for node in self._leaves]
        own_table = _file_table([tree_file])
        while len(level) > 1:
            level = [
                _append(tree, _inner_node(part), own_table, sum(child.tree_bytes for child in part))
                for part in (
                    level[start : start + _NODE_ENTRIES]
                    for start in range(0, len(level), _NODE_ENTRIES)
                )
            ]
        [root] = level

        def manifest(table: bytes) -> bytes:
            parts = (
                uuid,
                # Manifest kind "single"; then the configuration, without compression.
                _varints([0, _MAX_INLINE_VALUE_BYTES, _MAX_DECODED_NODE_BYTES]),
                bytes([_VERSION_TREE_ARITY_LOG2, 0]),
                table,
                # One version: generation 1, and the place of its root.
                _varints([1, 1]),
                bytes([root.node.height]),
                _varints([0, root.offset, root.length]),
                _varints([root.node.keys, root.tree_bytes, root.node.indirect]),
                struct.pack("<Q", created_ns),
                # No version nodes.
                b"\x00",
            )
            return _framed(_MANIFEST_MAGIC, b"".join(parts))

        return Database(
            bytes(tree), manifest(own_table), manifest(_file_table([tree_file], f"{folder}/"))
        )


def _batches(entries: Sequence[KeyValue]) -> Iterable[Sequence[KeyValue]]:
    start, inline = 0, 0
    for number, entry in enumerate(entries):
        size = len(entry.inline or b"")
        full = number - start >= _NODE_ENTRIES or inline + size > _NODE_INLINE_BYTES
        if number > start and full:
            yield entries[start:number]
            start, inline = number, 0
        inline += size
    yield entries[start:]


def _leaf_node(entries: Sequence[KeyValue]) -> _Node:
    indirect = [entry for entry in entries if entry.inline is None]
    lengths = [entry.length if entry.inline is None else len(entry.inline) for entry in entries]
    columns = b"".join(
        (
            _varints([len(entries)]),
            _keys([entry.key for entry in entries]),
            _varints(lengths),
            bytes([entry.inline is None for entry in entries]),
            _varints([entry.file for entry in indirect]),
            _varints([entry.offset for entry in indirect]),
            b"".join(entry.inline for entry in entries if entry.inline is not None),
        )
    )
    nbytes = sum(entry.length for entry in indirect)
    return _Node(0, entries[0].key, columns, len(entries), nbytes)


def _inner_node(children: Sequence[_Placed]) -> _Node:
    nodes = [child.node for child in children]
    columns = b"".join(
        (
            _varints([len(children)]),
            # Children store whole keys, so no common prefix is left out.
            _keys([node.first for node in nodes], _varints([0] * len(nodes))),
            _varints([0] * len(nodes)),
            _varints([child.offset for child in children]),
            _varints([child.length for child in children]),
            _varints([node.keys for node in nodes]),
            _varints([child.tree_bytes for child in children]),
            _varints([node.indirect for node in nodes]),
        )
    )
    keys, indirect = sum(node.keys for node in nodes), sum(node.indirect for node in nodes)
    return _Node(nodes[0].height + 1, nodes[0].first, columns, keys, indirect)


def _append(tree: bytearray, node: _Node, table: bytes, below: int = 0) -> _Placed:
    """Append an encoded node to `tree`; the nodes below it have `below` bytes."""
    encoded = _framed(_NODE_MAGIC, bytes([node.height]) + table + node.columns)
    offset = len(tree)
    tree += encoded
    return _Placed(node, offset, len(encoded), below + len(encoded))


def _keys(keys: Sequence[bytes], between: bytes = b"") -> bytes:
    """Encode sorted keys, each without the prefix that it shares with the one before it."""
    shared = [_common(a, b) for a, b in pairwise(keys)]
    suffixes = [keys[0], *(key[n:] for key, n in zip(keys[1:], shared, strict=True))]
    return b"".join(
        (_varints(shared), _varints([len(each) for each in suffixes]), between, *suffixes)
    )


def _common(a: bytes, b: bytes) -> int:
    """Return how many leading bytes two different keys share."""
    limit = min(len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    difference = int.from_bytes(a[:limit], "big") ^ int.from_bytes(b[:limit], "big")
    return limit - (difference.bit_length() + 7) // 8


def _file_table(paths: Sequence[str], base: str = "") -> bytes:
    """Encode the paths of data files without shared prefixes.

    Args:
        paths: The paths, relative to `base`.
        base: Path relative to the database. The paths in tree nodes of these files are relative to
            it, too.
    """
    encoded = [f"{base}{path}".encode() for path in paths]
    return b"".join(
        (
            _varints([len(encoded)]),
            bytes(len(encoded))[1:],
            _varints([len(path) for path in encoded]),
            _varints([len(base.encode())] * len(encoded)),
            *encoded,
        )
    )


def _framed(magic: int, body: bytes) -> bytes:
    """Return `body` with header and checksum; nodes and the manifest have the same frame."""
    length = 4 + 8 + len(_FORMAT_VERSION) + len(_UNCOMPRESSED) + len(body) + 4
    frame = struct.pack(">I", magic) + struct.pack("<Q", length) + _FORMAT_VERSION + _UNCOMPRESSED
    data = frame + body
    return data + struct.pack("<I", google_crc32c.value(data))


def _varints(numbers: Sequence[int]) -> bytes:
    """Encode numbers as base-128 varints, least significant group first."""
    if not numbers or max(numbers) < 0x80:
        return bytes(numbers)
    values = np.array(numbers, np.uint64)
    groups = -(-max(numbers).bit_length() // 7)
    # Every number is a row of groups of seven bits; all but its last group are marked.
    shifted = values[:, None] >> np.arange(0, 7 * groups, 7, dtype=np.uint64)
    is_used = shifted > 0
    is_used[:, 0] = True
    marks = np.zeros(shifted.shape, np.uint8)
    marks[:, :-1] = is_used[:, 1:].astype(np.uint8) << 7
    return ((shifted & np.uint64(0x7F)).astype(np.uint8) | marks)[is_used].tobytes()
