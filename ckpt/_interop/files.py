"""Checkpoints of other libraries in one file, recognized by content, whatever its name is."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Hashable, Mapping, Sequence

from msgspec.structs import replace

from ckpt._interop.flax import FORMAT as FLAX
from ckpt._interop.flax import open_flax
from ckpt._interop.foreign import ForeignCheckpoint
from ckpt._interop.numpy_files import ARRAY, open_numpy
from ckpt._interop.orbax import layout as orbax
from ckpt._interop.orbax.layout import OrbaxHead
from ckpt._interop.orbax.step import open_orbax
from ckpt._interop.safetensors import SUFFIX, is_header, open_safetensors
from ckpt._runtime.futures import for_each
from ckpt.errors import (
    CorruptCheckpointError,
    NotACheckpointError,
    StorageError,
    UnsupportedFormatError,
    located,
)
from ckpt.storage._base import Storage, fingerprint

_HEAD_BYTES = 16
# First bytes of an archive, and of a numpy array.
_ARCHIVE, _ARRAY = (b"PK\3\4", b"PK\5\6"), b"\x93NUMPY"
# First bytes of a msgpack dict, or of a Flax array in msgpack.
_FLAX = frozenset([*range(0x80, 0x90), 0xDE, 0xDF, *range(0xC7, 0xCA), *range(0xD4, 0xD9)])
_PARTS = "of weights of Flax in several files, which transformers reads (FlaxAutoModel)"
# Unsupported files, by pattern of the name and of the first bytes.
_UNREAD = (
    ("", rb"\x89HDF\r\n", "HDF5, as Keras writes it, which keras and h5py read"),
    ("", rb"\x80[\x02-\x05]", "a pickle, and to read one is to run the code in it"),
    (r"(?<!\.msgpack)$", rb"\x92[\x91-\x9f]", "a stream of msgpack, which EasyLM writes and reads"),
    (r"\.eqx$", b"", "a file of Equinox, which equinox.tree_deserialise_leaves reads"),
    (r"-\d{5}-of-\d{5}\.msgpack$", b"", f"a part {_PARTS}"),
)


async def open_foreign(
    storage: Storage, name: str, step: int | None = None
) -> ForeignCheckpoint | None:
    """Return the checkpoint of another library in a directory or file; None if there is none.

    Args:
        storage: The directory, or the place in a store.
        name: Name of the file or directory in it.
        step: The step of the root that the file is, which only a Flax file can be; or None.

    Raises:
        NotACheckpointError: The file is empty, or Orbax began the checkpoint and never finished it.
        CorruptCheckpointError: A file is damaged, or missing; names it.
        UnsupportedFormatError: The file, or an array in it, is of an unsupported kind; names it.
        StorageError: The store refused.
    """
    with located(step=step):
        found = await open_orbax(storage, name, step)
    if found is not None:
        return found
    where = f"{storage.location}/{name}"
    head = await head_of(storage, name)
    if step is not None:
        found = await open_flax(storage, name) if is_flax(head) else None
        return None if found is None else await _number_step(storage, name, step, found)
    if head is None:
        return await _directory(storage, name, where)
    if not head:
        raise NotACheckpointError(f"{where} is an empty file")
    for called, begins, what in _UNREAD:
        if re.search(called, name) and re.match(begins, head):
            raise _unread(where, what)
    is_array = head.startswith(_ARRAY) or name.endswith(ARRAY)
    if is_array or head.startswith(_ARCHIVE) or name.endswith(".npz"):
        return await open_numpy(storage, name, is_archive=not is_array)
    if name.endswith(SUFFIX) or is_header(head):
        return await open_safetensors(storage, name, is_file=True)
    return await open_flax(storage, name) if is_flax(head) or name.endswith(".msgpack") else None


async def head_of(storage: Storage, name: str) -> bytes | None:
    """Return the first bytes of a file; None if there is no such file."""
    head = bytearray(_HEAD_BYTES)
    # It may be shorter than that, a directory, or missing.
    with contextlib.suppress(CorruptCheckpointError, StorageError):
        await storage.read_block("", name, 0, memoryview(head))
        return bytes(head)
    with contextlib.suppress(CorruptCheckpointError):
        return await storage.read("", name, _HEAD_BYTES)
    return None


def is_flax(head: bytes | None) -> bool:
    """Return True if a file with these first bytes looks like a Flax file."""
    return bool(head and head[0] in _FLAX and not re.match(rb"\x80.", head, re.DOTALL))


async def _number_step(
    storage: Storage, name: str, step: int, found: ForeignCheckpoint
) -> ForeignCheckpoint:
    attempt = await fingerprint(storage, "", name)
    manifest = replace(found.manifest, step=step, attempt=attempt or found.manifest.attempt)
    return replace(found, manifest=manifest)


async def _directory(storage: Storage, name: str, where: str) -> ForeignCheckpoint | None:
    found = await open_safetensors(storage, name, is_file=False)
    if found is None:
        with contextlib.suppress(StorageError):
            for path in await storage.files(name):
                if path.endswith(".msgpack.index.json"):
                    raise _unread(f"{where}/{path}", f"the index {_PARTS}")
    return found


def _unread(where: str, what: str) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"{where} is {what}. It is not read here: load it with what wrote it, and save the arrays "
        "with ckpt.save"
    )


_MOST_LOOKS = 16


async def stamps_of(storage: Storage, names: Sequence[str]) -> list[Hashable | None]:
    """Return for each name a value that changes when another checkpoint takes its place."""
    stamps = await orbax.stamps_of(storage, names)
    # Stamps of files are texts; the stamps of directories are not.
    for number, name in enumerate(names):
        if stamps[number] is None:
            stamps[number] = await fingerprint(storage, "", name)
    return stamps


async def heads_of(
    storage: Storage, stamps: Mapping[str, Hashable], names: Sequence[str]
) -> list[OrbaxHead | None]:
    """Return the head of each name; None for a name that is not a checkpoint.

    Args:
        storage: The root.
        stamps: The stamps of these names, and of others.
        names: The names.
    """
    files = [name for name in names if isinstance(stamps[name], str)]
    folders = [name for name in names if not isinstance(stamps[name], str)]
    heads = dict(zip(folders, await orbax.heads_of(storage, folders), strict=True))

    async def look(name: str) -> None:
        head, stamp = await head_of(storage, name), str(stamps[name])
        heads[name] = OrbaxHead(stamp, 0, 0, None, FLAX) if is_flax(head) else None

    await for_each(look, files, _MOST_LOOKS)
    return [heads[name] for name in names]
