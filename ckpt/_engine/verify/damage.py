"""The meaning of a damaged file: the arrays that it hits, the sources of virtual steps included.

The meaning of a damaged file: the arrays that it hits, and the parts that can still be restored.
The role of a file follows from its name and the manifest: array data, a part of the database, a
file of a handler, or a file for other readers. Every chunk in a damaged data file is checked by
itself.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from functools import cached_property, partial

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ckpt._engine.restore.step_files import MISSING, VirtualFiles, unverified_arrays
from ckpt._engine.save.republication import republish
from ckpt._engine.verify.report import FileSelection, Problem, role_of
from ckpt._engine.verify.scanner import FirstDigest, Scanner
from ckpt._format.chunk_locations import ChunkLocation, places_in
from ckpt._format.leaf_table import DIGEST_BYTES, UNCHECKED, LeafEntry, LeafTable
from ckpt._format.manifest import ItemEntry, Manifest, encode, features, sizes
from ckpt._format.manifest_head import FILE_NAME
from ckpt._redaction import redact
from ckpt._runtime.futures import for_each
from ckpt._runtime.threads import run_in_thread
from ckpt._tree.boxes import unboxed_names
from ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StepDeletedError,
    StorageError,
    located,
)
from ckpt.storage._base import Attempt, Storage
from ckpt.storage._manifests import read_manifest

logger = logging.getLogger("ckpt")
_ALL_RIGHT = "every array still reads right"


class DamagedFile(Struct, frozen=True):
    """The damage of one file.

    Attributes:
        path: The file, relative to the step.
        reason: Description of the damage.
        nbytes: Bytes of it that may be readable; 0 if it is missing.
    """

    path: str
    reason: str
    nbytes: int


class _LeafDamage(Struct):
    """The damaged chunks of a leaf: their count, the number of the first, and its damage."""

    count: int
    first: int
    reason: str


async def problems_of_item(
    name: str,
    item: ItemEntry,
    damages: Sequence[DamagedFile],
    contradictory: Collection[int] | None,
    scanner: Scanner | None,
) -> list[Problem]:
    """Return the problems that follow from the damaged files of one item.

    Args:
        name: Name of the item.
        item: The item.
        damages: Its damaged files.
        contradictory: Leaves whose chunk locations cannot be trusted; None if no leaf can be.
        scanner: Reader of chunks; None to read nothing.
    """
    if contradictory is None:
        return [Problem(each.path, name, None, each.reason) for each in damages]
    return await _Finder(name, item, contradictory, scanner).problems(damages)


class _Finder:
    def __init__(
        self,
        name: str,
        item: ItemEntry,
        contradictory: Collection[int],
        scanner: Scanner | None,
    ) -> None:
        self._name = name
        self._item = item
        self._contradictory = contradictory
        self._scanner = scanner
        # The number of each data file, by its path in the step.
        self._data_files = {f"{name}/{path}": n for n, path in enumerate(item.data_files)}
        # All leaves that share the chunks of a leaf, itself included.
        self._sharers: dict[int, list[int]] = {}
        for number in range(len(item.leaves)):
            self._sharers.setdefault(_stored_leaf(item.leaves, number), []).append(number)

    async def problems(self, damages: Sequence[DamagedFile]) -> list[Problem]:
        hits = await self._hits(damages)
        found: list[Problem] = []
        for each in damages:
            own = hits.get(each.path)
            if own:
                found.extend(self._named(each, own))
            else:
                message = f"{each.reason}; {self._meaning(each)}"
                found.append(Problem(each.path, self._name, None, message))
        return found

    def _meaning(self, damage: DamagedFile) -> str:
        """Return the consequence of damage that was not found to hit an array."""
        role = "data"
        if damage.path not in self._data_files:
            role = role_of(self._item, damage.path.removeprefix(f"{self._name}/"))
        if role == "handler":
            return f"it belongs to what the handler {self._item.handler!r:.80} kept"
        if role == "view":
            return "only Orbax reads it: everything still reads right here"
        if role == "database":
            return f"only other readers (Orbax, TensorStore) need it: {_ALL_RIGHT} here"
        if self._scanner is None:
            return "no array was read to see which are hit (deep=True does)"
        if self._contradictory:
            return "no array is hit whose places can be believed"
        return f"{_ALL_RIGHT}: the damage is between chunks, or where nothing is read"

    def _named(self, damage: DamagedFile, hits: Mapping[int, _LeafDamage]) -> Iterator[Problem]:
        """Yield a problem for every leaf that is hit, and for the leaves that share its chunks."""
        hit_leaves = [(number, hits[first]) for first in hits for number in self._sharers[first]]
        for number, hit in sorted(hit_leaves, key=lambda each: each[0]):
            total = len(self._item.leaves[number].digests)
            which = f"chunk {hit.first} of {total}"
            if hit.count > 1:
                which = f"{hit.count} of {total} chunks, the first is chunk {hit.first}, which"
            message = f"{damage.reason}; {which} {hit.reason}"
            yield Problem(damage.path, self._name, self._names[number], message)

    @cached_property
    def _names(self) -> Sequence[str]:
        stored = self._item.leaves.names
        try:
            return unboxed_names(self._item.nodes, stored)
        except CorruptCheckpointError:
            return stored

    async def _hits(self, damages: Sequence[DamagedFile]) -> dict[str, dict[int, _LeafDamage]]:
        """Return the leaves with damaged chunks, by path of the damaged data file."""
        by_file = {
            self._data_files[each.path]: each for each in damages if each.path in self._data_files
        }
        places = await run_in_thread(partial(places_in, self._item, by_file))
        hits: dict[str, dict[int, _LeafDamage]] = {each.path: {} for each in by_file.values()}

        async def look(place: ChunkLocation, lane: int) -> None:
            damage = by_file[place.file]
            reason = await self._reason(damage, place, lane)
            if reason is None:
                return
            known = hits[damage.path].setdefault(place.leaf, _LeafDamage(0, place.number, reason))
            known.count += 1
            if place.number < known.first:
                known.first, known.reason = place.number, reason

        believed = (place for place in places if place.leaf not in self._contradictory)
        if self._scanner is None:
            for place in believed:
                await look(place, 0)
        else:
            await self._scanner.in_lanes(believed, look)
        return hits

    async def _reason(self, damage: DamagedFile, place: ChunkLocation, lane: int) -> str | None:
        """Return the damage of a chunk, or None."""
        if place.end > damage.nbytes:
            return "is in what is missing"
        if self._scanner is None:
            return None
        leaf = self._item.leaves[place.leaf]
        if leaf.digests[place.number] == UNCHECKED:
            return "has no digest that could tell whether it is right"
        try:
            found = await self._scanner.chunk_digest(damage.path, place, leaf, lane)
        except CheckpointError as error:
            return f"cannot be read: {error.message:.300}"
        return None if found == leaf.digests[place.number] else "is not what was saved"


def _stored_leaf(leaves: Sequence[LeafEntry], number: int) -> int:
    """Return the number of the leaf that stores the chunks of leaf `number`."""
    while (same_as := leaves[number].same_as) is not None:
        number = same_as
    return number


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
    return leaves.replaced(digests=digests.tobytes())
