"""Arrays that a file of another library holds one after the other, and their names as a tree."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import jax
from msgspec import Struct

from ckpt._format.array_format import parse_dtype
from ckpt._format.leaf_table import UNCHECKED, LeafEntry
from ckpt._redaction import redact
from ckpt._tree.leaf_names import MAX_DEPTH
from ckpt.errors import UnsupportedFormatError

logger = logging.getLogger("ckpt")
# Arrays are read in blocks of rows. A process then reads little more than the rows that its devices
# need: at most a sixteenth of an array, or a MiB, at either end. Blocks larger than 8 MiB are no
# faster.
_BLOCKS, _LEAST_BLOCK_BYTES, _MOST_BLOCK_BYTES = 16, 1 << 20, 8 << 20

# Fills a buffer with the bytes of a file from an offset on.
Fill = Callable[[int, memoryview], Awaitable[None]]


def kind_of(dtype: str) -> str:
    """Return the kind of array that is restored if the file does not record one.

    Normally this is a jax array. If `jax_enable_x64` is off, a 64-bit array is restored as a numpy
    array, with its dtype: jax would truncate it.
    """
    stored = parse_dtype(dtype)
    return "jax" if jax.dtypes.canonicalize_dtype(stored) == stored else "numpy"


class StoredRun(Struct, frozen=True):
    """An array in a file of another library with its elements contiguous in C order.

    Attributes:
        dtype: Name of its dtype in a manifest.
        shape: Its shape.
        offset: Offset of its first byte in the file.
        file: Number of the file.
        fill: Fills a buffer with its bytes from an offset on; None if they are so in the file.
        in_blocks: True if a block of its rows can be read alone.
        kind: Kind of the restored array, instead of `kind_of`; see `LeafForm`.
        check: Checksum that distinguishes it from another array like it.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int = 0
    file: int = 0
    fill: Fill | None = None
    in_blocks: bool = True
    kind: str | None = None
    check: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * parse_dtype(self.dtype).itemsize


def leaf_of_run(name: str, run: StoredRun) -> LeafEntry:
    """Return the leaf of an array."""
    shape, nbytes = run.shape, run.nbytes
    chunks, count, step = tuple(max(n, 1) for n in shape), 1 if nbytes else 0, 0
    if run.in_blocks and shape and nbytes:
        row = nbytes // shape[0]
        block = min(max(nbytes // _BLOCKS, _LEAST_BLOCK_BYTES), _MOST_BLOCK_BYTES)
        rows = min(max(block // row, 1), shape[0])
        chunks, step = (rows, *shape[1:]), rows * row
        count = -(-shape[0] // rows)
    return LeafEntry(
        name,
        run.kind or kind_of(run.dtype),
        run.dtype,
        shape,
        chunks,
        (UNCHECKED,) * count,
        tuple(run.offset + number * step for number in range(count)),
        (run.file,) * count,
        committed=False,
    )


def nested(names: Mapping[str, Any], where: str, separators: str = ".") -> Mapping[str, Any]:
    """Return a tree from values with flat names.

    `{"a.b": 1, "a.c": 2}` becomes `{"a": {"b": 1, "c": 2}}`. If one name is a prefix of another,
    the names stay flat, and a warning says so.

    Args:
        names: The values, by flat name.
        where: The file, for messages.
        separators: The characters at which names are split.

    Raises:
        UnsupportedFormatError: A name has more parts than any tree has levels.
    """
    between = re.compile(f"[{re.escape(separators)}]")
    paths = {name: tuple(between.split(name)) for name in names}
    deep = next((name for name, path in paths.items() if len(path) > MAX_DEPTH), None)
    if deep is not None:
        count = len(paths[deep])
        raise UnsupportedFormatError(
            f"{where}: its name has {count} parts, and no tree is deeper than {MAX_DEPTH} levels",
            leaf=deep,
        )
    leaves = set(paths.values())
    inner = {path[:end] for path in leaves for end in range(1, len(path))}
    # With several separators, two names may be the same path.
    if inner & leaves or len(leaves) != len(paths):
        logger.warning(
            "%s: some names are parts of others, so the names are the keys of one dict",
            redact(where),
        )
        return names
    tree: dict[str, Any] = {}
    for name, value in names.items():
        *keys, last = paths[name]
        node = tree
        for key in keys:
            node = node.setdefault(key, {})
        node[last] = value
    return tree
