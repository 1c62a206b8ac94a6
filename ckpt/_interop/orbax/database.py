"""The keys of a database and the places of their values, from all nodes of its tree.

Decoder for OCDBT databases: the manifest and the tree nodes that TensorStore writes. Pure. Source:
https://google.github.io/tensorstore/kvstore/ocdbt/index.html, "Storage format".
"""

from __future__ import annotations

import posixpath
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import google_crc32c
from msgspec import Struct

from ckpt._engine.codecs import decode_zstd
from ckpt._runtime.futures import for_each
from ckpt._runtime.threads import run_in_thread
from ckpt.errors import CorruptCheckpointError

# Decodes Zstandard frames of at most the given number of bytes.
Decode = Callable[[bytes, int], bytes]

# Larger nodes are refused before decoding. TensorStore's default is 8 MiB, Orbax's is 100 MiB.
MAX_NODE_BYTES = 256 << 20
_MANIFEST_MAGIC = 0x0CDB3A2A
_NODE_MAGIC = 0x0CDB20DE
_HEADER = struct.Struct(">I")
_LENGTH = struct.Struct("<Q")
_NUMBERED = 1
_ZSTD = 1
_MAX_HEIGHT = 32
_MAX_VARINT_BYTES = 10


class ValueLocation(Struct, frozen=True):
    """Bytes of a file of a database.

    Attributes:
        file: Path of the file, relative to the database.
        base: Part of that path which is the base of file paths in a node at this place.
        offset, length: Range of the bytes.
    """

    file: str
    base: str
    offset: int
    length: int


class NodeLocation(Struct, frozen=True):
    """A node below another one.

    Attributes:
        place: Its place.
        height: Its height; 0 for a node with values.
        prefix: Common prefix of all its keys.
    """

    place: ValueLocation
    height: int
    prefix: bytes


class TreeNode(Struct, frozen=True):
    """A decoded node: the values in it, or the nodes below it.

    Attributes:
        values: Values by key, or their places.
        children: The nodes below it.
    """

    values: dict[bytes, bytes | ValueLocation]
    children: Sequence[NodeLocation]


def parse_manifest(data: bytes, decode: Decode) -> NodeLocation | None:
    """Return the root of the newest version of a database; None if the database is empty.

    Raises:
        CorruptCheckpointError: The manifest is damaged, or of an unknown kind.
    """
    body = _Cursor(_body(data, _MANIFEST_MAGIC, decode))
    body.take(16)
    if body.number() == _NUMBERED:
        raise CorruptCheckpointError("its manifest is one of several, which Orbax does not write")
    body.numbers(2)
    body.take(1)
    if body.number() == _ZSTD:
        body.take(4)
    files = body.files("")
    count = body.number()
    if not count:
        return None
    body.numbers(count)
    heights = body.take(count)
    places = body.places(files, count)
    keys = body.numbers(count)
    # The newest version is the last one.
    if not keys[-1]:
        return None
    return NodeLocation(places[-1], heights[-1], b"")


def parse_node(data: bytes, node: NodeLocation, decode: Decode) -> TreeNode:
    """Return the content of a node.

    Raises:
        CorruptCheckpointError: The node is damaged.
    """
    body = _Cursor(_body(data, _NODE_MAGIC, decode))
    height = body.take(1)[0]
    if height != node.height or height > _MAX_HEIGHT:
        raise _damaged(f"a node of height {height} stands where one of {node.height} should")
    files = body.files(node.place.base)
    count = body.number()
    if not count:
        raise _damaged("a node is empty")
    shared = [0, *body.numbers(count - 1)]
    suffixes = body.numbers(count)
    prefixes = body.numbers(count) if height else []
    keys = body.strings(shared, suffixes)
    if height:
        places = body.places(files, count)
        children = [
            NodeLocation(place, height - 1, node.prefix + key[:length])
            for place, key, length in zip(places, keys, prefixes, strict=True)
        ]
        return TreeNode({}, children)
    lengths = body.numbers(count)
    kinds = body.take(count)
    indirect = [length for length, kind in zip(lengths, kinds, strict=True) if kind]
    ids = body.numbers(len(indirect))
    offsets = body.numbers(len(indirect))
    found: dict[bytes, bytes | ValueLocation] = {}
    outside = iter(zip(ids, offsets, strict=True))
    for key, length, kind in zip(keys, lengths, kinds, strict=True):
        if kind:
            number, offset = next(outside)
            found[node.prefix + key] = files.place(number, offset, length)
        else:
            found[node.prefix + key] = body.take(length)
    return TreeNode(found, ())


class _FileTable(Struct, frozen=True):
    """The data files that a node names, with the base of each."""

    paths: Sequence[str]
    bases: Sequence[str]

    def place(self, number: int, offset: int, length: int) -> ValueLocation:
        if number >= len(self.paths):
            raise _damaged(f"it names data file {number} of {len(self.paths)}")
        return ValueLocation(self.paths[number], self.bases[number], offset, length)


class _Cursor:
    """Reads the fields of a body one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise _damaged("it ends early")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def number(self) -> int:
        """Return a base-128 varint, least significant group first."""
        value = shift = 0
        for byte in self._data[self._at : self._at + _MAX_VARINT_BYTES]:
            self._at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise _damaged("a number does not end")

    def numbers(self, count: int) -> list[int]:
        if count > len(self._data) - self._at:
            raise _damaged(f"it has no room for {count} numbers")
        return [self.number() for _ in range(count)]

    def strings(self, shared: Sequence[int], suffixes: Sequence[int]) -> list[bytes]:
        """Return strings that each share a prefix with the one before."""
        found: list[bytes] = []
        last = b""
        for kept, length in zip(shared, suffixes, strict=True):
            if kept > len(last):
                raise _damaged("a key begins with more than the one before it")
            last = last[:kept] + self.take(length)
            found.append(last)
        return found

    def files(self, base: str) -> _FileTable:
        """Return a table of data files with paths relative to `base`."""
        count = self.number()
        if not count:
            return _FileTable((), ())
        shared = [0, *self.numbers(count - 1)]
        suffixes = self.numbers(count)
        lengths = self.numbers(count)
        paths = self.strings(shared, suffixes)
        try:
            texts = [path.decode() for path in paths]
            bases = [
                base + path[:length].decode() for path, length in zip(paths, lengths, strict=True)
            ]
        except UnicodeDecodeError:
            raise _damaged("the name of a data file is not text") from None
        return _FileTable([base + text for text in texts], bases)

    def places(self, files: _FileTable, count: int) -> list[ValueLocation]:
        numbers, offsets = self.numbers(count), self.numbers(count)
        lengths = self.numbers(count)
        found = [
            files.place(number, offset, length)
            for number, offset, length in zip(numbers, offsets, lengths, strict=True)
        ]
        return found


def _body(data: bytes, magic: int, decode: Decode) -> bytes:
    """Return the decompressed body of a frame, after checking its checksum."""
    start = _HEADER.size + _LENGTH.size
    if len(data) < start + 6 or _HEADER.unpack_from(data) != (magic,):
        raise _damaged("it does not begin as it should")
    (length,) = _LENGTH.unpack_from(data, _HEADER.size)
    if length != len(data):
        raise _damaged(f"it has {len(data)} bytes instead of {length}")
    if google_crc32c.value(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise _damaged("its checksum is another")
    version, compression = data[start], data[start + 1]
    if version:
        raise CorruptCheckpointError(f"it is of version {version} of OCDBT, which is not known")
    body = data[start + 2 : -4]
    return decode(body, MAX_NODE_BYTES) if compression == _ZSTD else body


def _damaged(why: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"the database of its arrays is damaged: {why}")


MANIFEST = "manifest.ocdbt"
# Returns bytes of a file, given its path, the offset and the number of bytes.
ReadRange = Callable[[str, int, int], Awaitable[bytes]]
Values = Mapping[str, bytes | ValueLocation]

# A limit for memory; Orbax's largest nodes have thousands of keys.
_MOST_NODES = 1_000_000
_CONCURRENT_NODES = 16


async def read_database(manifest: bytes, read: ReadRange) -> Values:
    """Return the values of a database by key, or their places.

    Raises:
        CorruptCheckpointError: The database is damaged.
        StorageError: The store refused.
    """
    root = parse_manifest(manifest, decode_zstd)
    found: dict[str, bytes | ValueLocation] = {}
    level = [] if root is None else [root]
    count = len(level)
    while level:
        nodes = await _read_level(level, read)
        for node in nodes:
            # Names of leaves are text; a key that is not text names no leaf.
            found |= {
                key.decode(errors="surrogateescape"): value for key, value in node.values.items()
            }
        level = [child for node in nodes for child in node.children]
        count += len(level)
        if count > _MOST_NODES:
            raise CorruptCheckpointError(f"the database of its arrays has {count} nodes")
    return found


async def _read_level(level: Sequence[NodeLocation], read: ReadRange) -> list[TreeNode]:
    nodes: dict[int, TreeNode] = {}

    async def read_node(number: int) -> None:
        place = level[number].place
        if place.length > MAX_NODE_BYTES:
            raise _damaged(f"a node of {place.length} bytes")
        data = await read(check_path(place.file), place.offset, place.length)
        parse = partial(parse_node, data, level[number], decode_zstd)
        nodes[number] = await run_in_thread(parse)

    await for_each(read_node, range(len(level)), _CONCURRENT_NODES)
    return [nodes[number] for number in range(len(level))]


def check_path(path: str) -> str:
    """Return a path that is below the database.

    Raises:
        CorruptCheckpointError: The path leads elsewhere.
    """
    if not path or path.startswith("/") or "\0" in path or posixpath.normpath(path) != path:
        raise CorruptCheckpointError(f"{path!r:.120} cannot be the name of a data file")
    if path == ".." or path.startswith("../"):
        raise CorruptCheckpointError(f"{path!r:.120} cannot be the name of a data file")
    return path
