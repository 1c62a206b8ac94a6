"""Adoption: the items of another library's checkpoint in a virtual step, with the data in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ckpt._engine.restore.step_files import FileLocation
from ckpt._format.chunk_locations import places_in
from ckpt._format.manifest import ItemEntry, Manifest
from ckpt._format.manifest_head import FileEntry, digest
from ckpt._format.step_files import SourceFile
from ckpt._interop.flax import FORMAT as FLAX
from ckpt._interop.foreign import ForeignFiles, writable_items
from ckpt._interop.numpy_files import FORMAT as NUMPY
from ckpt._runtime.futures import for_each
from ckpt._runtime.threads import run_in_thread
from ckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from ckpt.storage._base import fingerprint

_CONCURRENT_LOOKS = 16


class Adopted(Struct, frozen=True):
    """The items of a virtual step.

    Attributes:
        items: The items by name.
        sources: Data files that stay where they are, by the path that they would have in the step.
        files: Contents of the files of the step itself, by path.
    """

    items: Mapping[str, ItemEntry]
    sources: Mapping[str, SourceFile]
    files: Mapping[str, bytes]

    @property
    def entries(self) -> dict[str, FileEntry]:
        """The files of the step itself, as a manifest lists them."""
        return {path: FileEntry(len(data), digest(data)) for path, data in self.files.items()}


async def adopted(manifest: Manifest, theirs: ForeignFiles) -> Adopted:
    """Return a checkpoint of another library as the items of a step.

    Raises:
        CorruptCheckpointError: A file of the checkpoint is missing.
        UnsupportedFormatError: The checkpoint is a file of numpy or Flax, which must be converted.
        StorageError: The store refused.
    """
    if manifest.format in (FLAX, NUMPY):
        raise UnsupportedFormatError(
            f"files of {manifest.format} cannot be used where they are: they may be "
            "compressed, in pieces, or in another order. Convert the file instead: ckpt.convert"
        )
    items: dict[str, ItemEntry] = {}
    places: dict[str, FileLocation] = {}
    sizes: dict[str, int] = {}
    writable = writable_items(manifest)
    files = {
        path: theirs.kept[path] for path in manifest.files if path.partition("/")[0] in writable
    }
    for name, item in writable.items():
        ends = await run_in_thread(_ends, item)
        own = []
        for path, end in zip(item.data_files, ends, strict=True):
            data = theirs.kept.get(f"{name}/{path}")
            place = None if data is not None else theirs.place_of(f"{name}/{path}")
            # Like the names of all data files, this one is a digest.
            text = data if place is None else place.location.encode(errors="surrogateescape")
            own.append(f"d/{digest(text or b'')}")
            if place is not None and end:
                places[f"{name}/{own[-1]}"] = place
                sizes[f"{name}/{own[-1]}"] = end
            elif data:
                files[f"{name}/{own[-1]}"] = data
        items[name] = replace(item, data_files=own)
    sources: dict[str, SourceFile] = {}

    async def look(path: str) -> None:
        place = places[path]
        found = await fingerprint(place.storage, place.folder, place.path)
        if found is None:
            raise CorruptCheckpointError(f"{place.location} is missing; it was damaged")
        sources[path] = SourceFile(place.place, place.path, sizes[path], found)

    await for_each(look, places, _CONCURRENT_LOOKS)
    return Adopted(items, {path: sources[path] for path in places}, files)


def _ends(item: ItemEntry) -> Sequence[int]:
    """Return the end of the last chunk in every data file."""
    ends = [0] * len(item.data_files)
    for place in places_in(item, range(len(ends))):
        ends[place.file] = max(ends[place.file], place.end)
    return ends
