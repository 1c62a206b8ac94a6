"""A part of a step on the disk of its process."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from ckpt._conversion.copies.step_location import StepLocation
from ckpt._format.digests import digest
from ckpt._format.manifest import Manifest
from ckpt._format.manifest_head import FILE_NAME, HEAD_BYTES, MAX_BYTES, PART_FILE, FileEntry, peek
from ckpt._format.step_files.step_part import decode_part
from ckpt.errors import CorruptCheckpointError
from ckpt.storage._base import Storage
from ckpt.storage._manifests import files_folder, read_manifest


class JoinPart(Struct, frozen=True):
    """A part of a step.

    Attributes:
        place: Location of the part.
        manifest: Its manifest.
        files: The files that the joined step takes from it.
        report: Description of the content of these files.
    """

    place: StepLocation
    manifest: Manifest
    files: Mapping[str, FileEntry]
    report: bytes


async def read_part(place: StepLocation, step: int, process: int, count: int) -> JoinPart:
    """Read the data that a join needs of a part.

    Args:
        place: Location of the part.
        step: The step.
        process: Number of the part.
        count: Number of parts.

    Raises:
        StepNotFoundError: The part is gone.
        CorruptCheckpointError: The part is damaged, or is another part.
        UnsupportedFormatError: The part has a later format.
        StorageError: The storage refused.
    """
    manifest = await read_manifest(place.storage, place.name, step=step)
    where = f"{place.location}/{PART_FILE}"
    entry = manifest.files.get(PART_FILE)
    if entry is None or not manifest.save:
        raise CorruptCheckpointError(
            f"{where} is missing: {place.location} is not a part that can be joined with others"
        )
    data = await place.storage.read(files_folder(place.name, manifest), PART_FILE, MAX_BYTES)
    if data is None or digest(data) != entry.digest:
        raise CorruptCheckpointError(f"{where} is damaged, so the step cannot be joined")
    part = decode_part(data, where)
    if (part.process, part.count) != (process, count):
        raise CorruptCheckpointError(
            f"{where} is part {part.process} of {part.count}; expected part {process} of {count}"
        )
    # The part file still names items that were deleted since.
    dropped = {each.item for each in manifest.dropped}
    wanted = [path for path in part.files if path.partition("/")[0] not in dropped]
    unknown = [path for path in wanted if path not in manifest.files]
    if unknown:
        raise CorruptCheckpointError(f"{where} names {unknown[0]!r:.200}, which the part lacks")
    files = {path: manifest.files[path] for path in wanted}
    return JoinPart(place, manifest, files, part.report)


async def save_at(storage: Storage, step_dir: str) -> str:
    """Return the id of the save in a step directory; empty if it has none, or there is no step."""
    (head,) = await storage.read_each([step_dir], FILE_NAME, MAX_BYTES, HEAD_BYTES, peek)
    return "" if head is None else head.save
