"""A step that is open for reading, whoever wrote it: what it holds, and where its files are.

Imports neither jax nor tensorstore: lists of steps are made of it.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from msgspec import Struct

from ckpt._engine.restore.step_files import StepFiles
from ckpt.errors import (
    CorruptCheckpointError,
    InvalidArgumentError,
    NotACheckpointError,
    StepNotFoundError,
    StorageError,
    located,
)
from ckpt.storage._base import Storage
from ckpt.storage._manifests import read_manifest, read_sized
from ckpt.storage._resolve import open_step_dir

if TYPE_CHECKING:
    from ckpt._format.manifest import Manifest


class OpenedStep(Struct, frozen=True):
    """A committed step, or a checkpoint by itself.

    Attributes:
        storage: The root that it is in.
        step_dir: Its directory.
        manifest: What it holds; of an item that was named by its path, only that.
        foreign: Its files, if another library wrote it.
        manifest_bytes: Bytes of the manifest itself; 0 if there is none.
        item: The item, if it was named by its path; empty for the whole of the step.
    """

    storage: Storage
    step_dir: str
    manifest: Manifest
    foreign: StepFiles | None = None
    manifest_bytes: int = 0
    item: str = ""

    @property
    def location(self) -> str:
        """Where it is, for messages."""
        return f"{self.storage.location}/{self.step_dir}/{self.item}".rstrip("/")

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of its files, of the manifest, too; None of what another library wrote.

        Of that, not all files are known.
        """
        if self.foreign is not None:
            return None
        return self.manifest_bytes + sum(each.size for each in self.manifest.files.values())


async def open_step(storage: Storage, step_dir: str, step: int | None = None) -> OpenedStep | None:
    """Open a step of this library or of Orbax, or a file of another; return None without any.

    A directory of an item in a step of this library is that item: it has digests.

    Args:
        storage: The root.
        step_dir: Its directory.
        step: The expected step, or None for a checkpoint by itself.

    Raises:
        NotACheckpointError: It is one that Orbax never finished.
        CorruptCheckpointError: What describes it is damaged.
        UnsupportedFormatError: It is of a later format, or has nothing that can be read.
    """
    try:
        manifest, nbytes = await read_sized(storage, step_dir, step=step)
        return OpenedStep(storage, step_dir, manifest, manifest_bytes=nbytes)
    except (NotACheckpointError, StepNotFoundError):
        inside = None if step is not None else await item_at(storage, step_dir)
        if inside is not None:
            return inside
        # Only here, since most programs never need them.
        from ckpt._interop.orbax.step import open_orbax

        with located(step=step):
            found = await open_orbax(storage, step_dir, step)
        # A step of a root is never a file of another library.
        if found is None and step is None:
            from ckpt._interop.files import open_file

            found = await open_file(storage, step_dir)
        return None if found is None else OpenedStep(storage, step_dir, found.manifest, found.files)


async def item_at(storage: Storage, name: str) -> OpenedStep | None:
    """Return the item of a step of this library that is at a place; None if that is in no step.

    What readers of other formats find in a step is never compared with its digests. So they must
    not get to see it.

    Raises:
        NotACheckpointError: It is in a step, and no item of it; or its step has lost its manifest.
        CorruptCheckpointError: The manifest of its step is damaged.
        UnsupportedFormatError: Its step is of a later format.
    """
    while True:
        try:
            storage, step_dir = open_step_dir(getattr(storage, "config", storage.location))
        except InvalidArgumentError:
            # A whole disk, or bucket.
            return None
        manifest = await _manifest_of_step(storage, step_dir)
        if manifest is not None:
            return _item_of(storage, step_dir, manifest, name)
        name = f"{step_dir}/{name}"


async def _manifest_of_step(storage: Storage, step_dir: str) -> Manifest | None:
    """Return the manifest of a step of this library; None if the directory is none."""
    # Only here, since most programs never need it.
    from ckpt._interop.orbax.layout import MOST_BYTES, SUCCESS, names_a_path

    try:
        try:
            return await read_manifest(storage, step_dir)
        except (NotACheckpointError, CorruptCheckpointError):
            success = await storage.read(step_dir, SUCCESS, MOST_BYTES)
            if success is not None and not names_a_path(success):
                raise
    except StorageError as error:
        # Whoever may read a checkpoint may not read all that is above it.
        if error.errno not in (errno.EACCES, errno.EPERM):
            raise
    return None


def _item_of(storage: Storage, step_dir: str, manifest: Manifest, path: str) -> OpenedStep | None:
    """Return the item of a step at a path in it; None if what is there is not of the step."""
    # With numpy, which lists of steps do without.
    from ckpt._format.manifest import of_item

    item, _, below = path.partition("/")
    if item in manifest.items and not below:
        return OpenedStep(storage, step_dir, of_item(manifest, item), item=item)
    is_listed = any(f"{each}/".startswith(f"{path}/") for each in manifest.files)
    if item in manifest.items or is_listed or item == manifest.folder:
        where = f"{storage.location}/{step_dir}"
        raise NotACheckpointError(
            f"{where}/{path:.300} is in the checkpoint {where}, and is no item of it: give the "
            "path of the checkpoint, or of an item. What is below an item is read with at=, such "
            "as at='params'"
        )
    return None
