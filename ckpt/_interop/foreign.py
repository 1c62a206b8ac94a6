"""A checkpoint of another library: a manifest in memory, over that library's files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ckpt._engine.restore.step_files import FileLocation
from ckpt._format.leaf_table import LeafEntry, LeafTable
from ckpt._format.manifest import ItemEntry, Manifest
from ckpt._format.manifest_head import digest, other_metrics
from ckpt._format.step_files import UNNAMED, is_item_name
from ckpt._interop.runs_of_bytes import Fill, StoredRun, leaf_of_run
from ckpt._plan.leaf_entries import check_readable, unread_items
from ckpt._runtime.threads import run_in_thread
from ckpt._tree.leaf_kinds import unreadable_leaf
from ckpt._tree.structure import Structure, describe
from ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    UnsupportedFormatError,
    UnsupportedLeafError,
    located,
)
from ckpt.storage._base import Storage

logger = logging.getLogger("ckpt")

# Errors about a file or a leaf that cannot be read.
UNREAD_ERRORS = (CorruptCheckpointError, UnsupportedFormatError)


class ForeignCheckpoint(Struct, frozen=True):
    """A checkpoint of another library.

    Attributes:
        manifest: The manifest that describes it.
        files: Its files, under the names that they have in the manifest.
    """

    manifest: Manifest
    files: ForeignFiles


class ForeignFiles(Struct, frozen=True):
    """The files of a foreign checkpoint, under the names of its manifest.

    Attributes:
        storage, step_dir: Place of the checkpoint.
        folders: Directory of every item in it, with `/` at the end unless it is empty.
        kept: Contents of files that are in memory.
        links: Targets of files that are links, by their names in the manifest.
        made: Functions that make files from parts of others when they are read.
    """

    storage: Storage
    step_dir: str
    folders: Mapping[str, str] = field(default_factory=lambda: {UNNAMED: ""})
    kept: Mapping[str, bytes] = {}
    links: Mapping[str, FileLocation] = {}
    made: Mapping[str, Fill] = {}

    def place_of(self, path: str) -> FileLocation:
        """Return the place of a data file that is not in memory."""
        found = self.links.get(path)
        if found is not None:
            return found
        item, _, rest = path.partition("/")
        return FileLocation(self.storage, self.step_dir, self.folders[item] + rest)

    async def read(self, path: str, limit: int) -> bytes | None:
        """Return a small file; see `Storage.read`."""
        return self.kept.get(path)

    async def read_block(
        self,
        path: str,
        offset: int,
        target: memoryview,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Fill `target` with bytes of a data file; see `Storage.read_block`."""
        kept, fill = self.kept.get(path), self.made.get(path)
        if kept is None and fill is None:
            place = self.place_of(path)
            await place.storage.read_block(place.folder, place.path, offset, target, then)
            return
        if kept is not None:
            target[:] = kept[offset : offset + len(target)]
        elif fill is not None:
            await fill(offset, target)
        if then is not None:
            await run_in_thread(then)


def checkpoint_of(
    library: str,
    found: ForeignFiles,
    files: Sequence[str],
    structure: Structure,
    leaves: Sequence[StoredRun | LeafEntry | CheckpointError],
    where: str,
    metadata: Mapping[str, Any] | None = None,
) -> ForeignCheckpoint:
    """Return a checkpoint that consists of one tree.

    Args:
        library: The library of its format.
        found: Its files.
        files: Paths of its files, in the order of their numbers.
        structure: The tree.
        leaves: Its leaves: an array in a file, an entry, or the error of an unreadable leaf.
        where: The file or directory, for messages.
        metadata: User metadata of the checkpoint.

    Raises:
        CheckpointError: None of its leaves can be read; the error of the first one.
    """
    errors = [leaf for leaf in leaves if isinstance(leaf, CheckpointError)]
    if errors and len(errors) == len(leaves):
        with naming(where), located(leaf=structure.names[0]):
            raise errors[0]
    paths = list(files)
    made: dict[str, Fill] = {}
    entries: list[LeafEntry] = []
    for name, leaf in zip(structure.names, leaves, strict=True):
        if isinstance(leaf, CheckpointError):
            leaf = unreadable_leaf(name, named(leaf, where))
        if isinstance(leaf, LeafEntry):
            entries.append(leaf)
            continue
        if leaf.fill is not None:
            # This path is below a file, so no other file has it.
            paths.append(f"{files[leaf.file]}/{len(paths)}")
            made[f"{UNNAMED}/{paths[-1]}"] = leaf.fill
            leaf = replace(leaf, file=len(paths) - 1, offset=0)
        entries.append(leaf_of_run(name, leaf))
    nbytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, StoredRun))
    checks = [leaf.check for leaf in leaves if isinstance(leaf, StoredRun)]
    manifest = Manifest(
        format=library,
        version=1,
        step=None,
        # Identifies this checkpoint among those that may be at the same place.
        attempt=digest(f"{files!r} {entries!r} {checks!r}".encode()),
        unnamed=True,
        items={
            UNNAMED: ItemEntry(
                "pytree", list(structure.nodes), LeafTable.of(entries), [], paths, nbytes
            )
        },
        created_ns=0,
        committed_ns=0,
        writer={},
        process_count=1,
        files={},
        metadata=dict(metadata) if metadata else None,
    )
    return ForeignCheckpoint(manifest, replace(found, made=made))


def writable_items(manifest: Manifest) -> dict[str, ItemEntry]:
    """Return the items that a step of this library can have; warnings name the others.

    Raises:
        CheckpointError: A leaf or an item cannot be read; says why.
    """
    unread = unread_items(manifest.items)
    for name, reason in unread.items():
        logger.warning("the item %r is left out, since it is not read: %s", name, reason)
    items = {name: item for name, item in manifest.items.items() if name not in unread}
    found = {name: item for name, item in items.items() if is_item_name(name)}
    check_readable(found)
    metrics = other_metrics(manifest.metrics)
    if metrics:
        logger.warning("metrics that cannot be kept are left out: %s", ", ".join(metrics))
    others = [name for name in items if name not in found]
    if others:
        logger.warning(
            "%s: no step of this library has items of such names, so they are left out. Load them, "
            "and save them under other names",
            ", ".join(f"the item {name!r}" for name in others),
        )
    return found


def structure_of(tree: Any, where: str) -> Structure:
    """Return leaves, names and nodes of the tree in a file.

    Raises:
        UnsupportedFormatError: This library has no such tree.
    """
    try:
        return describe(tree)
    except UnsupportedLeafError as error:
        raise UnsupportedFormatError(f"{where}: {error.message}", leaf=error.leaf) from error


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Add the name of a file to errors about it that lack the name."""
    try:
        yield
    except UNREAD_ERRORS as error:
        raise named(error, where) from None


def named(error: CheckpointError, where: str) -> CheckpointError:
    """Return an error about a file with the name of the file."""
    if where in error.message:
        return error
    return type(error)(f"{where}: {error.message}", leaf=error.leaf)
