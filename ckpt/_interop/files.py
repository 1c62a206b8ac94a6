"""Checkpoints of other libraries that are a file: which library has written which."""

from __future__ import annotations

from ckpt._interop.flax.checkpoint import is_named_like_flax, open_flax
from ckpt._interop.foreign import ForeignCheckpoint
from ckpt._interop.numpy_files import SUFFIXES, open_numpy
from ckpt._interop.safetensors.checkpoint import SUFFIX, open_safetensors
from ckpt.storage._base import Storage


def is_read(name: str) -> bool:
    """Tell whether a file of this name is read as a checkpoint."""
    return name.endswith((SUFFIX, *SUFFIXES)) or is_named_like_flax(name)


async def open_file(storage: Storage, name: str) -> ForeignCheckpoint | None:
    """Return the checkpoint in a file, or in a directory of safetensors; None if there is none.

    Args:
        storage: The directory, or the place in a store.
        name: The file or directory in it.

    Raises:
        CorruptCheckpointError: A file is damaged, or missing; names it.
        UnsupportedFormatError: An array is of a kind that is not read; names it.
        StorageError: The store refused.
    """
    if name.endswith(SUFFIXES):
        return await open_numpy(storage, name)
    if is_named_like_flax(name):
        found = await open_flax(storage, name)
        if found is not None:
            return found
    return await open_safetensors(storage, name)
