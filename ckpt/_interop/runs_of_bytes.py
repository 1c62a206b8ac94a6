"""Arrays that are one run of bytes in a file of another library, as leaves of a manifest."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax

from ckpt._format.dtypes import parse_dtype
from ckpt._format.leaf_table import UNCHECKED, LeafEntry

# They are read in blocks of rows, so that a process reads little more than the rows that its
# devices need: at most a sixteenth of an array, or a MiB, at either end. Larger blocks than 8 MiB
# are no faster.
_BLOCKS, _LEAST_BLOCK_BYTES, _MOST_BLOCK_BYTES = 16, 1 << 20, 8 << 20


def kind_of(dtype: str) -> str:
    """Return what an array comes back as, of which a file does not say whose it was.

    An array of jax as a rule. Where `jax_enable_x64` is off, one of 64 bits is an array of numpy,
    as it was saved: jax would cut it.
    """
    stored = parse_dtype(dtype)
    return "jax" if jax.dtypes.canonicalize_dtype(stored) == stored else "numpy"


def leaf_of_run(
    name: str,
    kind: str,
    dtype: str,
    shape: Sequence[int],
    file: int,
    offset: int,
    *,
    in_blocks: bool = True,
) -> LeafEntry:
    """Return the leaf of an array whose elements follow each other, in C order.

    Args:
        name: Its name.
        kind: What it comes back as; see `LeafForm`.
        dtype: Its dtype, by the name it has in a manifest.
        shape: Its shape.
        file: Number of its data file.
        offset: Its first byte there.
        in_blocks: Whether a block of its rows can be read alone.
    """
    shape = tuple(shape)
    nbytes = math.prod(shape) * parse_dtype(dtype).itemsize
    chunks, count, step = tuple(max(n, 1) for n in shape), 1 if nbytes else 0, 0
    if in_blocks and shape and nbytes:
        row = nbytes // shape[0]
        block = min(max(nbytes // _BLOCKS, _LEAST_BLOCK_BYTES), _MOST_BLOCK_BYTES)
        rows = min(max(block // row, 1), shape[0])
        chunks, step = (rows, *shape[1:]), rows * row
        count = -(-shape[0] // rows)
    return LeafEntry(
        name,
        kind,
        dtype,
        shape,
        chunks,
        (UNCHECKED,) * count,
        tuple(offset + number * step for number in range(count)),
        (file,) * count,
        committed=False,
    )
