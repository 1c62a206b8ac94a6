"""Unreadable steps: directories that are named like steps and are no committed steps.

Such steps are never passed over in silence: a run that took a root of damaged steps, or of another
library's steps, for an empty one would begin again from scratch.

A step that is open for reading, from any library: its manifest and the place of its files. Imports
neither jax nor tensorstore, since lists of steps use it.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from msgspec import Struct
from msgspec.structs import replace

from ckpt._format.manifest_head import FILE_NAME, MAX_BYTES
from ckpt._format.step_files import BEGUN, SUCCESS, UNFINISHED, is_own_mark
from ckpt.errors import (
    CorruptCheckpointError,
    InvalidArgumentError,
    NotACheckpointError,
    StepNotFoundError,
    StorageError,
    UnsupportedFormatError,
)
from ckpt.storage._base import HasDirectories, Storage
from ckpt.storage._manifests import read_manifest, read_sized
from ckpt.storage._resolve import open_step_dir

if TYPE_CHECKING:
    from ckpt._format.manifest import Manifest
    from ckpt._interop.foreign import ForeignFiles

# Kinds of such a directory: a damaged step of this library, a step of a later version, one without
# read permission, a step that Orbax began and did not finish, or something else.
Kind = Literal["damaged", "later", "forbidden", "orbax", "other"]

_MOST_BYTES = 16 << 20
_SHOWN = 12


class UnreadableStep(Struct, frozen=True):
    """A directory that is named like a step and is no committed step.

    Attributes:
        step: The step number in the name of the directory.
        kind: Kind of the directory.
        reason: Reason why it cannot be read.
    """

    step: int
    kind: Kind
    reason: str


async def look_closely(storage: Storage, step_dir: str, step: int) -> UnreadableStep | None:
    """Find out why a directory is no committed step; None if it is gone, or is a step now."""
    where = f"{storage.location}/{step_dir}"
    try:
        if await storage.read(step_dir, FILE_NAME, MAX_BYTES) is not None:
            manifest = await read_manifest(storage, step_dir, step=step)
            cut = await storage.cut_files({step_dir: manifest.sizes})
            if step_dir not in cut or not await storage.exists(step_dir):
                return None
            reason = f"{where}/{cut[step_dir]}; a copy of it is not complete, or it was damaged"
            return UnreadableStep(step, "damaged", reason)
        success = await storage.read(step_dir, SUCCESS, _MOST_BYTES)
        if success is not None and success.endswith(f" {step_dir}".encode()):
            return UnreadableStep(step, "damaged", f"{where} has lost {FILE_NAME}")
        is_begun = await storage.read(step_dir, BEGUN, _MOST_BYTES) is not None
        if not is_begun:
            # In an object store, the objects of a save under way have names like this, too.
            if not isinstance(storage, HasDirectories) or not await storage.exists(step_dir):
                return None
            is_begun = any(UNFINISHED in path for path in await storage.files(step_dir))
        if is_begun:
            reason = f"Orbax never finished {where}, or its {BEGUN} is damaged"
            return UnreadableStep(step, "orbax", reason)
    except CorruptCheckpointError as error:
        return UnreadableStep(step, "damaged", error.message.rstrip("."))
    except UnsupportedFormatError as error:
        return UnreadableStep(step, "later", error.message.rstrip("."))
    except StorageError as error:
        # ENOTDIR: the name belongs to a file.
        if error.errno != errno.ENOTDIR:
            raise
    return UnreadableStep(step, "other", f"{where} has no {FILE_NAME}")


def described(found: Sequence[UnreadableStep]) -> list[str]:
    """Return a sentence for each kind of unreadable step, for messages."""
    texts = []
    for each in found:
        if each.kind != "other":
            problem = "is damaged" if each.kind == "damaged" else "cannot be read"
            texts.append(f"step {each.step} {problem} and is left out: {each.reason}")
    steps = sorted({each.step for each in found if each.kind == "other"})
    if steps:
        what = "a step" if len(steps) == 1 else f"{len(steps)} steps"
        are = "it is" if len(steps) == 1 else "they are"
        texts.append(
            f"it holds {what} of another program ({shortened(steps)}), without a {FILE_NAME}; "
            f"{are} left out"
        )
    return texts


def shortened(steps: Sequence[int]) -> str:
    """Return ascending steps as text; a long list is cut to the first and the last ones."""
    shown = [str(step) for step in (steps if len(steps) <= _SHOWN else [*steps[:3], *steps[-8:]])]
    if len(steps) > _SHOWN:
        shown.insert(3, "...")
    return ", ".join(shown)


class OpenedStep(Struct, frozen=True):
    """A committed step, or a one-shot checkpoint.

    Attributes:
        storage: The root of the step.
        step_dir: Directory of the step.
        manifest: Manifest of the step, or of one item if the item was named by its path.
        foreign: Files of the step, if another library wrote it.
        manifest_bytes: Bytes of the manifest itself; 0 if there is none.
        item: The item, if it was named by its path; empty for the whole step.
    """

    storage: Storage
    step_dir: str
    manifest: Manifest
    foreign: ForeignFiles | None = None
    manifest_bytes: int = 0
    item: str = ""

    @property
    def location(self) -> str:
        """Path of the step or item, for messages."""
        return f"{self.storage.location}/{self.step_dir}/{self.item}".rstrip("/")

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of its files with the manifest; None for a step of another library.

        Not all files of such a step are known.
        """
        if self.foreign is not None:
            return None
        return self.manifest_bytes + sum(each.size for each in self.manifest.files.values())


async def open_step(storage: Storage, step_dir: str, step: int | None = None) -> OpenedStep | None:
    """Open a step of this library or of Orbax, or a file of another library; None if there is none.

    The directory of an item in a step of this library opens as that item: it has digests.

    Args:
        storage: The root.
        step_dir: Directory of the step.
        step: The expected step, or None for a one-shot checkpoint.

    Raises:
        NotACheckpointError: Orbax never finished the step.
        CorruptCheckpointError: The manifest or metadata are damaged.
        UnsupportedFormatError: The format is a later one, or nothing in the step can be read.
    """
    try:
        manifest, nbytes = await read_sized(storage, step_dir, step=step)
        return OpenedStep(storage, step_dir, manifest, manifest_bytes=nbytes)
    except (NotACheckpointError, StepNotFoundError):
        inside = None if step is not None else await item_at(storage, step_dir)
        if inside is not None:
            return inside
        # Imported here, since most programs never need it.
        from ckpt._interop.files import open_foreign

        found = await open_foreign(storage, step_dir, step)
        return None if found is None else OpenedStep(storage, step_dir, found.manifest, found.files)


async def item_at(storage: Storage, name: str) -> OpenedStep | None:
    """Return the item of a step of this library at this path; None if the path is in no step.

    Readers of other formats never compare what they find in a step with its digests. So they must
    not see the files of a step of this library.

    Raises:
        NotACheckpointError: The path is in a step but is no item; or the step lost its manifest.
        CorruptCheckpointError: The manifest of the step is damaged.
        UnsupportedFormatError: The step has a later format.
    """
    while True:
        try:
            storage, step_dir = open_step_dir(getattr(storage, "config", storage.location))
        except InvalidArgumentError:
            # The top is reached: a whole disk or bucket.
            return None
        manifest = await _manifest_of_step(storage, step_dir)
        if manifest is not None:
            return _item_of(storage, step_dir, manifest, name)
        name = f"{step_dir}/{name}"


async def _manifest_of_step(storage: Storage, step_dir: str) -> Manifest | None:
    """Return the manifest of a step of this library; None if the directory is none."""
    try:
        try:
            return await read_manifest(storage, step_dir)
        except (NotACheckpointError, CorruptCheckpointError):
            if is_own_mark(await storage.read(step_dir, SUCCESS, _MOST_BYTES)):
                raise
    except StorageError as error:
        # The user of a checkpoint need not have permission to read all folders above it.
        if error.errno not in (errno.EACCES, errno.EPERM):
            raise
    return None


def _item_of(storage: Storage, step_dir: str, manifest: Manifest, path: str) -> OpenedStep | None:
    """Return the item at a path in a step; None if the path does not belong to the step."""
    # Imported here: this needs numpy, and lists of steps do without it.
    from ckpt._format.manifest import of_item

    item, _, below = path.partition("/")
    if item in manifest.items and not below:
        alone = of_item(manifest, item)
        if manifest.extensions:
            from ckpt.extensions._readers import notes_on_step

            noted = notes_on_step(alone.items, manifest.extensions, "part")
            alone = replace(alone, extensions=noted)
        return OpenedStep(storage, step_dir, alone, item=item)
    is_listed = any(f"{each}/".startswith(f"{path}/") for each in manifest.files)
    if item in manifest.items or is_listed or item == manifest.folder:
        where = f"{storage.location}/{step_dir}"
        raise NotACheckpointError(
            f"{where}/{path:.300} is in the checkpoint {where}, and is no item of it: give the "
            "path of the checkpoint, or of an item. What is below an item is read with at=, such "
            "as at='params'"
        )
    return None
