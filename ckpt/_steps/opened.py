"""A step that is open for reading, whoever wrote it: what it holds, and where its files are.

Imports neither jax nor tensorstore: lists of steps are made of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from ckpt._engine.restore.step_files import StepFiles
from ckpt.errors import NotACheckpointError, StepNotFoundError, located
from ckpt.storage._base import Storage
from ckpt.storage._manifests import read_sized

if TYPE_CHECKING:
    from ckpt._format.manifest import Manifest


class OpenedStep(Struct, frozen=True):
    """A committed step, or a checkpoint by itself.

    Attributes:
        step_dir: Its directory.
        manifest: What it holds.
        foreign: Its files, if another library wrote it.
        manifest_bytes: Bytes of the manifest itself; 0 if there is none.
    """

    step_dir: str
    manifest: Manifest
    foreign: StepFiles | None = None
    manifest_bytes: int = 0

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
        return OpenedStep(step_dir, manifest, manifest_bytes=nbytes)
    except (NotACheckpointError, StepNotFoundError):
        # Only here, since most programs never need them.
        from ckpt._interop.orbax.step import open_orbax

        with located(step=step):
            found = await open_orbax(storage, step_dir, step)
        # A step of a root is never a file of another library.
        if found is None and step is None:
            from ckpt._interop.files import open_file

            found = await open_file(storage, step_dir)
        return None if found is None else OpenedStep(step_dir, found.manifest, found.files)
