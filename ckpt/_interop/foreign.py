"""A checkpoint that another library wrote: a manifest in memory, over that library's files."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

from ckpt._engine.restore.step_files import FilePlace
from ckpt._format.manifest import Manifest
from ckpt._runtime.threads import run_in_thread
from ckpt.storage._base import Storage


class ForeignCheckpoint(Struct, frozen=True):
    """A checkpoint of another library.

    Attributes:
        manifest: What it holds.
        files: Its files, under the names that they have in the manifest.
    """

    manifest: Manifest
    files: ForeignFiles


class ForeignFiles(Struct, frozen=True):
    """The files of such a checkpoint, under the names of a manifest.

    Attributes:
        storage, step_dir: Where it is.
        folders: Of every item its directory there, with `/` at the end unless it is empty.
        kept: Files that are in memory.
        links: Files that are links, by their names in the manifest: where they really are.
    """

    storage: Storage
    step_dir: str
    folders: Mapping[str, str]
    kept: Mapping[str, bytes] = {}
    links: Mapping[str, FilePlace] = {}

    def place_of(self, path: str) -> FilePlace:
        """Return where a data file that is not in memory is."""
        found = self.links.get(path)
        if found is not None:
            return found
        item, _, rest = path.partition("/")
        return FilePlace(self.storage, self.step_dir, self.folders[item] + rest)

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
        kept = self.kept.get(path)
        if kept is None:
            place = self.place_of(path)
            await place.storage.read_block(place.folder, place.path, offset, target, then)
            return
        target[:] = kept[offset : offset + len(target)]
        if then is not None:
            await run_in_thread(then)
