"""The files of a virtual step: some are its own, others lie where another library put them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ckpt._engine.restore.step_files import OwnFiles, StepFiles
from ckpt._format.manifest import Manifest
from ckpt._format.step_files.source_files import SourceFile
from ckpt._redaction import redact
from ckpt.errors import CorruptCheckpointError, InvalidArgumentError
from ckpt.storage._base import Storage, fingerprint
from ckpt.storage._manifests import files_folder
from ckpt.storage._resolve import open_beside

MISSING = "is missing"
_CHANGED = "was changed after this step was made of it"


def files_of(storage: Storage, step_dir: str, manifest: Manifest) -> StepFiles:
    """Return the files of a step of this library, virtual or not."""
    own = OwnFiles(storage, files_folder(step_dir, manifest))
    return VirtualFiles(own, manifest) if manifest.sources else own


class VirtualFiles:
    """The files of a virtual step.

    As long as its chunks have no digests, a source is compared with its fingerprint after every
    read. Later the digests decide, and the fingerprint only explains why they differ.
    """

    def __init__(self, own: OwnFiles, manifest: Manifest) -> None:
        """Read files in the directory of the step with `own`."""
        self._own = own
        self._sources = manifest.sources
        self._unverified = unverified_arrays(manifest) > 0
        self._storages: dict[str, Storage] = {}

    async def read(self, path: str, limit: int) -> bytes | None:
        """Return a small file; small files are all the step's own."""
        return await self._own.read(path, limit)

    async def read_block(
        self,
        path: str,
        offset: int,
        target: memoryview,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Fill `target` with bytes of a data file; see `Storage.read_block`.

        Raises:
            CorruptCheckpointError: A source is missing, or was changed.
        """
        source = self._sources.get(path)
        if source is None:
            await self._own.read_block(path, offset, target, then)
            return
        try:
            await self._storage(source).read_block("", source.path, offset, target, then)
        except CorruptCheckpointError as error:
            await self._refuse_changed(source, error)
            raise
        except ExceptionGroup as damage:
            # The bytes differ from their digests.
            raise damage.derive(
                [_error_in_source(each, source) for each in damage.exceptions]
            ) from None
        if self._unverified:
            # Compared after the read: any change that the bytes reflect has changed the
            # fingerprint, too.
            await self._refuse_changed(source)

    async def problem(self, path: str) -> str | None:
        """Return the fault of a source, as far as it shows without reading it, or None.

        If there are digests, they decide, and not the time of a file: a backup may change it.
        """
        source = self._sources[path]
        found = await self._fingerprint(source)
        if found is None:
            return MISSING
        if self._unverified:
            return None if found == source.fingerprint else _CHANGED
        last = memoryview(bytearray(1))
        try:
            await self._storage(source).read_block("", source.path, source.size - 1, last)
        except CorruptCheckpointError:
            return "is shorter than it was"
        return None

    async def _refuse_changed(
        self, source: SourceFile, error: CorruptCheckpointError | None = None
    ) -> None:
        found = await self._fingerprint(source)
        if found == source.fingerprint:
            return
        what = f"{_CHANGED}; adopt it again"
        if found is None:
            what = f"{MISSING}; put it back, or adopt the files where they are now"
        raise CorruptCheckpointError(
            f"{redact(source.location)} {what}. The step in {redact(self._own.storage.location)}/"
            f"{self._own.folder} has no copy of its bytes",
            leaf=None if error is None else error.leaf,
        ) from (None if error is None else error.__cause__ or error)

    async def _fingerprint(self, source: SourceFile) -> str | None:
        return await fingerprint(self._storage(source), "", source.path)

    def _storage(self, source: SourceFile) -> Storage:
        if source.folder not in self._storages:
            try:
                opened = open_beside(self._own.storage, source.folder)
            except InvalidArgumentError as error:
                raise CorruptCheckpointError(
                    f"{redact(source.location)} cannot be reached: {error.message}"
                ) from error
            self._storages[source.folder] = opened
        return self._storages[source.folder]


def _error_in_source(error: Exception, source: SourceFile) -> Exception:
    """Return the error about a chunk, extended by the file that holds its bytes."""
    if not isinstance(error, CorruptCheckpointError):
        return error
    return CorruptCheckpointError(
        f"{error.message}. Its bytes are in {redact(source.location)}, which the step has no copy "
        "of",
        leaf=error.leaf,
    )


def unverified_arrays(manifest: Manifest) -> int:
    """Return the number of arrays with chunks whose digests are still unknown."""
    count = 0
    for item in manifest.items.values():
        chunks = item.leaves.unchecked()
        count += len(np.unique(np.searchsorted(item.leaves.firsts, chunks, side="right")))
    return count
