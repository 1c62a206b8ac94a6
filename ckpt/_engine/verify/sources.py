"""The sources of a virtual step, verified: compared, or given digests the first time."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ckpt._engine.restore.virtual_files import MISSING, VirtualFiles, unverified_arrays
from ckpt._engine.save.republication import republish
from ckpt._engine.verify.damage import DamagedFile
from ckpt._engine.verify.file_selection import FileSelection
from ckpt._engine.verify.scanner import FirstDigest, Scanner
from ckpt._format.chunk_locations import ChunkLocation, places_in
from ckpt._format.leaf_table import DIGEST_BYTES, UNCHECKED, LeafTable
from ckpt._format.manifest import ItemEntry, Manifest, encode, features, sizes
from ckpt._format.manifest_head import FILE_NAME
from ckpt._redaction import redact
from ckpt._runtime.tasks import for_each
from ckpt._runtime.threads import run_in_thread
from ckpt.errors import CorruptCheckpointError, StepDeletedError, StorageError, located
from ckpt.storage._base import Attempt, Storage
from ckpt.storage._manifests import read_manifest

logger = logging.getLogger("ckpt")

# Digests by name of the item.
FirstDigests = dict[str, list[FirstDigest]]


class _DataFile(Struct, frozen=True):
    """A data file, and the chunks in it."""

    item: str
    entry: ItemEntry
    path: str
    places: list[ChunkLocation]


async def compare_sources(
    files: VirtualFiles,
    manifest: Manifest,
    wrong: Mapping[str, Set[int]],
    scanner: Scanner | None,
    selection: FileSelection,
    first: FirstDigests,
) -> dict[str, DamagedFile]:
    """Return the sources that differ from the files that the step was made of.

    Args:
        files: The files of the step.
        manifest: Its manifest.
        wrong: The leaves whose places cannot be trusted, by item.
        scanner: Reader of the sources; None to check their fingerprints only.
        selection: The sources that it reads; of the others only fingerprints are checked.
        first: Output for the digests of the chunks that have none.
    """
    damages: dict[str, DamagedFile] = {}
    unverified = unverified_arrays(manifest) > 0

    async def compare(file: _DataFile, lane: int) -> None:
        source = manifest.sources.get(file.path)
        try:
            problem = None if source is None else await files.problem(file.path)
            is_readable = problem != MISSING and not (problem and unverified)
            if scanner is not None and is_readable and selection.begins(file.path):
                problem = await _read(scanner, file, lane, first)
        except (StorageError, CorruptCheckpointError) as error:
            problem = f"cannot be read: {error.message}"
        # Data files that are in the step are compared like all of its files.
        if problem is not None and source is not None:
            size = 0 if problem == MISSING else source.size
            reason = f"{redact(source.location)} {problem}"
            damages[file.path] = DamagedFile(file.path, reason, size)

    found = await run_in_thread(_data_files, manifest, wrong)
    if scanner is not None:
        last = len(selection.order)
        found.sort(key=lambda file: selection.order.get(file.path, last))
        await scanner.in_lanes(found, compare)
    else:
        await for_each(lambda file: compare(file, 0), found)
    return damages


def _data_files(manifest: Manifest, wrong: Mapping[str, Set[int]]) -> list[_DataFile]:
    found = []
    for name, contradictory in wrong.items():
        item = manifest.items[name]
        places: dict[int, list[ChunkLocation]] = {}
        for place in places_in(item, range(len(item.data_files))):
            if place.leaf not in contradictory:
                places.setdefault(place.file, []).append(place)
        for number, file in enumerate(item.data_files):
            if number in places:
                found.append(_DataFile(name, item, f"{name}/{file}", places[number]))
    return found


async def _read(scanner: Scanner, file: _DataFile, lane: int, first: FirstDigests) -> str | None:
    """Read the chunks in a data file; return its fault, or None."""
    leaves = file.entry.leaves
    plain = [place for place in file.places if leaves[place.leaf].codec is None]
    end = max((place.end for place in plain), default=0)
    found = await scanner.scan_file(file.path, end, plain, leaves, lane)
    news, is_right = found.first, found.is_right
    for place in file.places:
        leaf = leaves[place.leaf]
        if leaf.codec is not None:
            digest = await scanner.chunk_digest(file.path, place, leaf, lane)
            if leaf.digests[place.number] == UNCHECKED:
                news.append((place, digest))
            else:
                is_right = is_right and digest == leaf.digests[place.number]
    if news:
        first.setdefault(file.item, []).extend(news)
    return None if is_right else "was changed after this step was verified"


async def note_digests(
    storage: Storage, step_dir: str, manifest: Manifest, first: FirstDigests
) -> bool:
    """Write the first digests of a step into its manifest; if that fails, warn and return False."""

    async def write(attempt: Attempt) -> Mapping[str, int]:
        items = {
            name: replace(item, leaves=_with_digests(item.leaves, first.get(name, [])))
            for name, item in manifest.items.items()
        }
        new = replace(
            manifest,
            items=items,
            attempt=attempt.id,
            folder=attempt.folder,
            requires=features(items, attempt.folder, virtual=True),
        )
        await for_each(lambda path: storage.link(attempt, path, manifest.folder), manifest.files)
        encoded = await run_in_thread(encode, new)
        await storage.write(attempt, FILE_NAME, encoded)
        return sizes(new, encoded)

    try:
        with located(step=manifest.step):
            await republish(storage, step_dir, write, replacing=manifest.attempt)
    except StepDeletedError:
        # Another process may have verified it at the same time.
        if unverified_arrays(await read_manifest(storage, step_dir, step=manifest.step)):
            raise
    except StorageError as error:
        logger.warning(
            "%s: the digests that were found could not be kept: %s",
            redact(f"{storage.location}/{step_dir}"),
            error,
        )
        return False
    return True


def _with_digests(leaves: LeafTable, found: list[FirstDigest]) -> LeafTable:
    digests = np.frombuffer(leaves.digests, np.uint8).reshape(-1, DIGEST_BYTES).copy()
    for place, digest in found:
        digests[leaves.firsts[place.leaf] + place.number] = np.frombuffer(
            bytes.fromhex(digest), np.uint8
        )
    return LeafTable(
        leaves.names,
        leaves.forms,
        leaves.form,
        digests.tobytes(),
        leaves.offsets,
        leaves.files,
        leaves.lengths,
        leaves.same_as,
        leaves.values,
    )
