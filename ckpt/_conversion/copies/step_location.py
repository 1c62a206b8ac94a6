"""The place of a copy, and its present content: nothing, the same step, or another one.

The content is determined from manifests and lists of files, without reading arrays.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from msgspec import Struct

from ckpt._engine.verify.report import role_of
from ckpt._format.leaf_table import DIGEST_BYTES, LeafTable
from ckpt._format.manifest import ItemEntry, Manifest
from ckpt._runtime.threads import run_in_thread
from ckpt.errors import (
    CorruptCheckpointError,
    NotACheckpointError,
    StepExistsError,
    StorageError,
    UnsupportedFormatError,
)
from ckpt.storage._base import UNKNOWN_SIZE, ReadsSteps, Storage
from ckpt.storage._manifests import files_folder, read_manifest

# Content of the place of a copy: nothing; the same step; the same step, damaged or without its
# arrays; another step; or a damaged step that may or may not have been the same.
Presence = Literal["nothing", "same", "damaged", "other", "unknown"]


class CopySource(Struct, frozen=True):
    """A step directory that can be read.

    Attributes:
        storage: The storage that it is read from.
        name: Its name there.
    """

    storage: ReadsSteps
    name: str

    @property
    def location(self) -> str:
        """Path or URL of the directory."""
        return f"{self.storage.location}/{self.name}"


class StepLocation(CopySource, frozen=True):
    """A step directory of a root, which may not exist."""

    storage: Storage


async def presence_of(
    wanted: Manifest, target: StepLocation, *, whole: bool, deep: bool = False
) -> Presence:
    """Return the present content of the place of a copy.

    Args:
        wanted: The manifest of the step, reduced to the part to copy.
        target: The place.
        whole: True if the arrays of a virtual step must be there, too.
        deep: Read every byte at the place; otherwise compare names and sizes.
    """
    try:
        found = await read_manifest(target.storage, target.name)
    except NotACheckpointError:
        return "nothing"
    except UnsupportedFormatError:
        return "other"
    except CorruptCheckpointError:
        return "damaged" if await _has_files_of(wanted, target) else "unknown"
    if not await run_in_thread(is_copy, wanted, found):
        return "other"
    if whole and found.sources:
        return "damaged"
    if not deep and not found.sources:
        return "same" if await has_files(found, target) else "damaged"
    # Imported only here, since names and sizes are compared without jax.
    from ckpt._engine.verify.pipeline import verify_step_dir

    report = await verify_step_dir(target.storage, target.name, None, deep, (), may_write=False)
    return "same" if report.ok else "damaged"


async def has_files(manifest: Manifest, target: StepLocation) -> bool:
    """Return True if a list of a step directory shows the files of its manifest."""
    try:
        found = await target.storage.files(files_folder(target.name, manifest))
    except StorageError as error:
        if error.errno != errno.ENOENT:
            raise
        # The step was deleted just now.
        return False
    sizes = {path: file.size for path, file in manifest.files.items()}
    return all(found.get(path) in (size, UNKNOWN_SIZE) for path, size in sizes.items())


async def copied_meanwhile(
    error: StepExistsError, wanted: Manifest, target: StepLocation, *, whole: bool
) -> None:
    """Raise the error of a copy, unless another process has just made the same copy."""
    if await presence_of(wanted, target, whole=whole) != "same":
        raise error


async def _has_files_of(wanted: Manifest, target: StepLocation) -> bool:
    """Return True if a damaged step has data files of another step; their names are random."""
    names = {
        f"{name}/{path}" for name, item in wanted.items.items() for path in item.data_files
    } & wanted.files.keys()
    found = await target.storage.files(target.name)
    # In stores, data files are in a folder.
    return any(path in names or path.partition("/")[2] in names for path in found)


def is_copy(wanted: Manifest, found: Manifest) -> bool:
    """Return True if a manifest is of a copy of a step, copied file by file or written anew.

    A copy has the times of the save, to the nanosecond, and the digests of all chunks that are cut
    in the same way. The places and the division of its files do not matter.
    """
    return _identity(wanted) == _identity(found) and holds_the_same(wanted, found)


def holds_the_same(wanted: Manifest, found: Manifest) -> bool:
    """Return True if two manifests have the same items and contents, whenever they were saved."""
    return (
        wanted.items.keys() == found.items.keys()
        and all(_is_same(item, found.items[name]) for name, item in wanted.items.items())
        and _handler_files(wanted) == _handler_files(found)
    )


def _identity(manifest: Manifest) -> tuple[Any, ...]:
    return (
        manifest.step,
        manifest.unnamed,
        manifest.metrics,
        manifest.metadata,
        manifest.parent,
        manifest.created_ns,
        # Each process of a job commits its part at another time.
        None if manifest.save else manifest.committed_ns,
        manifest.save,
    )


def _handler_files(manifest: Manifest) -> Mapping[str, str]:
    """Return the digests of the files that handlers wrote."""
    found = {}
    for path, file in manifest.files.items():
        name, _, rest = path.partition("/")
        item = manifest.items.get(name)
        if item is not None and role_of(item, rest) == "handler":
            found[path] = file.digest
    return found


def _is_same(wanted: ItemEntry, found: ItemEntry) -> bool:
    return (
        wanted.handler == found.handler
        and wanted.data == found.data
        and wanted.nodes == found.nodes
        and _are_same(wanted.leaves, found.leaves)
    )


def _are_same(wanted: LeafTable, found: LeafTable) -> bool:
    if (
        list(wanted.names) != list(found.names)
        or wanted.same_as != found.same_as
        or wanted.values != found.values
        or _kinds(wanted) != _kinds(found)
    ):
        return False
    if wanted.digests == found.digests and np.array_equal(wanted.firsts, found.firsts):
        # A copy file by file: its thousands of leaves need no comparison one by one.
        return True
    return not any(_differ(wanted, found, number) for number in range(len(wanted)))


def _kinds(table: LeafTable) -> Sequence[tuple[Any, ...]]:
    kinds = [(each.kind, each.dtype, each.shape, each.weak_type, each.impl) for each in table.forms]
    return [kinds[number] for number in table.form.tolist()]


def _differ(wanted: LeafTable, found: LeafTable, number: int) -> bool:
    """Return True if digests prove that the contents of a leaf differ."""
    tables = wanted, found
    if len({each.forms[int(each.form[number])].chunks for each in tables}) > 1:
        return False
    digests = []
    for each in tables:
        first, end = (DIGEST_BYTES * int(place) for place in each.firsts[number : number + 2])
        digests.append(np.frombuffer(each.digests[first:end], np.uint64).reshape(-1, 2))
    if len(digests[0]) != len(digests[1]):
        return True
    # Zeros stand for unknown digests.
    known = digests[0].any(axis=1) & digests[1].any(axis=1)
    return bool((digests[0] != digests[1])[known].any())
