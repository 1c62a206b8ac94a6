"""The keys of a database, and where their values are: all nodes of the tree, read and decoded."""

from __future__ import annotations

import posixpath
from collections.abc import Awaitable, Callable, Mapping, Sequence

import anyio

from ckpt._engine.codecs import decode_zstd
from ckpt._interop.orbax.ocdbt_nodes import (
    MAX_NODE_BYTES,
    NodePlace,
    TreeNode,
    ValuePlace,
    parse_manifest,
    parse_node,
)
from ckpt._runtime.threads import run_in_thread
from ckpt.errors import CorruptCheckpointError

MANIFEST = "manifest.ocdbt"
# Returns bytes of a file: its path, the offset and how many.
ReadRange = Callable[[str, int, int], Awaitable[bytes]]
Values = Mapping[str, bytes | ValuePlace]

# More would not fit into memory; Orbax's largest nodes have thousands of keys.
_MOST_NODES = 1_000_000
_CONCURRENT_NODES = 16


async def read_database(manifest: bytes, read: ReadRange) -> Values:
    """Return the values of a database by key, or where they are.

    Raises:
        CorruptCheckpointError: It is damaged.
        StorageError: The store refused.
    """
    root = parse_manifest(manifest, decode_zstd)
    found: dict[str, bytes | ValuePlace] = {}
    level = [] if root is None else [root]
    count = len(level)
    while level:
        nodes = await _read_level(level, read)
        for node in nodes:
            # Names of leaves are text; what is none is the name of no leaf.
            found |= {
                key.decode(errors="surrogateescape"): value for key, value in node.values.items()
            }
        level = [child for node in nodes for child in node.children]
        count += len(level)
        if count > _MOST_NODES:
            raise CorruptCheckpointError(f"the database of its arrays has {count} nodes")
    return found


async def _read_level(level: Sequence[NodePlace], read: ReadRange) -> list[TreeNode]:
    """Return the nodes of one level of the tree."""
    nodes: list[TreeNode | None] = [None] * len(level)
    slots = anyio.Semaphore(_CONCURRENT_NODES)

    async def read_node(number: int, child: NodePlace) -> None:
        place = child.place
        if place.length > MAX_NODE_BYTES:
            raise CorruptCheckpointError(
                f"the database of its arrays is damaged: a node of {place.length} bytes"
            )
        async with slots:
            data = await read(check_path(place.file), place.offset, place.length)
            nodes[number] = await run_in_thread(lambda: parse_node(data, child, decode_zstd))

    async with anyio.create_task_group() as tasks:
        for number, child in enumerate(level):
            tasks.start_soon(read_node, number, child)
    return [node for node in nodes if node is not None]


def check_path(path: str) -> str:
    """Return a path of a file below the database.

    Raises:
        CorruptCheckpointError: It leads elsewhere.
    """
    if not path or path.startswith("/") or "\0" in path or posixpath.normpath(path) != path:
        raise CorruptCheckpointError(f"{path!r:.120} cannot be the name of a data file")
    if path == ".." or path.startswith("../"):
        raise CorruptCheckpointError(f"{path!r:.120} cannot be the name of a data file")
    return path
