"""The keys of a database and the places of their values, from all nodes of its tree."""

from __future__ import annotations

import posixpath
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from ckpt._engine.codecs import decode_zstd
from ckpt._interop.orbax.ocdbt_nodes import (
    MAX_NODE_BYTES,
    NodeLocation,
    TreeNode,
    ValueLocation,
    parse_manifest,
    parse_node,
)
from ckpt._runtime.tasks import for_each
from ckpt._runtime.threads import run_in_thread
from ckpt.errors import CorruptCheckpointError

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
            raise CorruptCheckpointError(
                f"the database of its arrays is damaged: a node of {place.length} bytes"
            )
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
