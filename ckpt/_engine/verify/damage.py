"""What a damaged file means: which arrays it hits, and what still reads right.

A file is told from its name and the manifest: data of arrays, a part of a database, a file of a
handler, or one for other readers. Of a damaged data file every chunk is looked at by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import anyio
import numpy as np

from ckpt._engine.restore.checks import check_chunk
from ckpt._engine.restore.chunk_sources import ItemDatabase, StoredChunk
from ckpt._engine.verify.report import Problem
from ckpt._engine.verify.scanner import MOST_WHOLE_BYTES, Scanner
from ckpt._format.chunk_locations import ChunkLocation, places_in, region_of
from ckpt._format.dtypes import parse_dtype
from ckpt._format.manifest import ItemEntry, LeafEntry
from ckpt._tree.flatten import unboxed_names
from ckpt.errors import CheckpointError, CorruptCheckpointError
from ckpt.storage._base import Storage

__all__ = ["DamagedFile", "problems_of_item", "role_of"]

# What of an item only Orbax reads; see docs/format.md.
_VIEW = frozenset({"_METADATA", "_sharding", "_strings.json", "array_metadatas/process_0"})
_DATABASE = "manifest.ocdbt"
_ALL_RIGHT = "every array still reads right"
# Chunks in a database are not copied much: this many times the bytes of its files is a lie.
_MOST_COPIES = 4
_SLACK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class DamagedFile:
    """What is wrong with one file.

    Attributes:
        path: The file, relative to the step.
        reason: What is wrong with it.
        nbytes: How many bytes of it can be tried to be read; 0 where it is not there.
        maps: Whether it can be mapped into memory without risk: it is a regular file whose bytes
            the store hands out.
    """

    path: str
    reason: str
    nbytes: int
    maps: bool


@dataclass(slots=True)
class _LeafDamage:
    """The chunks of a leaf that were found damaged: how many, the first, and what it has."""

    count: int
    first: int
    reason: str


def role_of(item: ItemEntry, path: str) -> str:
    """Return what a file of an item is: `data`, `database`, `view` or `handler`.

    Args:
        item: The item.
        path: The file, relative to the item.
    """
    first = path.split("/")[0]
    if path in item.data_files:
        return "data"
    if path == _DATABASE or (item.leaves and (first == "d" or first.startswith("lane_"))):
        return "database"
    is_tree = bool(item.nodes or item.leaves)
    # Of an item that is no tree it is for Orbax, unless its handler reads it.
    described = path == "metadata" and item.handler != "json"
    return "view" if (is_tree and path in _VIEW) or described else "handler"


async def problems_of_item(
    name: str,
    item: ItemEntry,
    damages: Sequence[DamagedFile],
    contradictory: Collection[int] | None,
    bytes_there: int,
    regular: bool,
    scanner: Scanner | None,
    storage: Storage,
    entry: str,
) -> list[Problem]:
    """Return the problems that damaged files of one item come to.

    Args:
        name: Name of the item.
        item: The item.
        damages: Its damaged files.
        contradictory: Leaves whose places cannot be believed; None if no leaf can.
        bytes_there: What all files of the item have.
        regular: Whether nothing below the item is a link, a FIFO or the like.
        scanner: Reads chunks; None to read nothing.
        storage: Where the step lies.
        entry: Under which name.
    """
    if contradictory is None:
        return [Problem(each.path, name, None, each.reason) for each in damages]
    finder = _Finder(name, item, contradictory, bytes_there, regular, scanner, storage, entry)
    return await finder.problems(damages)


class _Finder:
    """Finds the leaves of one item that damaged files hit."""

    def __init__(
        self,
        name: str,
        item: ItemEntry,
        contradictory: Collection[int],
        bytes_there: int,
        regular: bool,
        scanner: Scanner | None,
        storage: Storage,
        entry: str,
    ) -> None:
        self._name = name
        self._item = item
        self._contradictory = contradictory
        self._bytes_there = bytes_there
        self._regular = regular
        self._data_files = frozenset(item.data_files)
        self._names: Sequence[str] = ()
        # By the leaf whose chunks they have, all leaves that share them.
        self._sharers: dict[int, list[int]] = {}
        for number in range(len(item.leaves)):
            self._sharers.setdefault(_first(item.leaves, number), []).append(number)
        self._scanner = scanner
        self._storage = storage
        self._entry = entry
        self._unplaced = [
            number
            for number, leaf in enumerate(item.leaves)
            if leaf.digests and not leaf.offsets and number not in contradictory
        ]

    async def problems(self, damages: Sequence[DamagedFile]) -> list[Problem]:
        hits = await self._hits_of_files(damages)
        concerned = [each for each in damages if self._role(each) in ("data", "database")]
        shared: dict[int, _LeafDamage] = {}
        rest = ""
        if self._unplaced and concerned:
            shared, rest = await self._hits_of_database(concerned)
        # Where only one file is damaged, it is the one; else the database as a whole is named.
        culprit = concerned[0].path if len(concerned) == 1 else ""
        found: list[Problem] = []
        for each in damages:
            own = hits.get(each.path, {}) | (shared if each.path == culprit else {})
            found.extend(self._named(each.path, each.reason, own))
            if not own:
                meaning = self._meaning(each, rest, shared)
                found.append(Problem(each.path, self._name, None, f"{each.reason}; {meaning}"))
        if shared and not culprit:
            reason = f"{len(concerned)} files of the database are damaged"
            found.extend(self._named(f"{self._name}/{_DATABASE}", reason, shared))
        return found

    def _role(self, damage: DamagedFile) -> str:
        path = damage.path.removeprefix(f"{self._name}/")
        return "data" if path in self._data_files else role_of(self._item, path)

    def _meaning(self, damage: DamagedFile, rest: str, shared: Mapping[int, _LeafDamage]) -> str:
        """Say what follows from the damage of a file in which no array was found hit."""
        role = self._role(damage)
        if role == "handler":
            return f"it belongs to what the handler {self._item.handler!r:.80} kept"
        if role == "view":
            return "only Orbax reads it: everything still reads right here"
        if self._unplaced and (rest or shared):
            return rest or "see the arrays that are named with the item's database"
        if role == "data" and self._scanner is None:
            return "no array was read to see which are hit (deep=True does)"
        if role == "database" and not self._unplaced:
            return f"only other readers (Orbax, TensorStore) need it: {_ALL_RIGHT} here"
        if self._contradictory:
            return "no array is hit whose places can be believed"
        return f"{_ALL_RIGHT}: the damage is between chunks, or where nothing is read"

    def _named(self, path: str, reason: str, hits: Mapping[int, _LeafDamage]) -> Iterator[Problem]:
        """Yield a problem for every leaf that is hit, and for those that share its chunks."""
        hit_leaves = [(number, hits[first]) for first in hits for number in self._sharers[first]]
        for number, hit in sorted(hit_leaves, key=lambda each: each[0]):
            total = len(self._item.leaves[number].digests)
            which = f"chunk {hit.first} of {total}"
            if hit.count > 1:
                which = f"{hit.count} of {total} chunks, the first is chunk {hit.first}, which"
            name = self._name_of(number)
            yield Problem(path, self._name, name, f"{reason}; {which} {hit.reason}")

    def _name_of(self, number: int) -> str:
        if not self._names:
            stored = [leaf.name for leaf in self._item.leaves]
            try:
                self._names = unboxed_names(self._item.nodes, stored)
            except CorruptCheckpointError:
                self._names = stored
        return self._names[number]

    async def _hits_of_files(
        self, damages: Sequence[DamagedFile]
    ) -> dict[str, dict[int, _LeafDamage]]:
        """Return the leaves that are hit by way of their places, by path of the damaged file."""
        numbers = {file: number for number, file in enumerate(self._item.data_files)}
        by_file = {
            numbers[path]: each
            for each in damages
            if (path := each.path.removeprefix(f"{self._name}/")) in numbers
        }
        places = await anyio.to_thread.run_sync(partial(places_in, self._item, by_file))
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
        """Return what is wrong with a chunk, or None."""
        if place.end > damage.nbytes:
            return "lies in what is missing"
        if self._scanner is None:
            return None
        leaf = self._item.leaves[place.leaf]
        try:
            found = await self._scanner.chunk_digest(damage.path, place, leaf, lane)
        except CheckpointError as error:
            return f"cannot be read: {error.message:.300}"
        return None if found == leaf.digests[place.number] else "is not what was saved"

    async def _hits_of_database(
        self, damages: Sequence[DamagedFile]
    ) -> tuple[dict[int, _LeafDamage], str]:
        """Return the leaves that read wrong by way of the database, and what is not known."""
        if self._scanner is None:
            return {}, "which arrays it hits is only known after reading them (deep=True)"
        if not self._regular or not all(each.maps for each in damages):
            # TensorStore follows links, and waits for a FIFO. It reads by mapping files, and a page
            # that cannot be read then ends the process.
            return {}, "which arrays it hits cannot be told while a file of the item is unreadable"
        database = ItemDatabase(self._storage.database_spec(self._entry, self._name), self._name)
        hits: dict[int, _LeafDamage] = {}
        counts: Counter[int] = Counter()
        left = self._bytes_there * _MOST_COPIES + _SLACK_BYTES
        for number in self._unplaced:
            leaf = self._item.leaves[number]
            for chunk in range(len(leaf.digests)):
                nbytes = region_of(leaf, chunk).size * parse_dtype(leaf.dtype).itemsize
                left -= nbytes
                if nbytes > MOST_WHOLE_BYTES or left < 0:
                    reason = "is larger than what its files can hold, or too large for a check"
                else:
                    reason = await _database_reason(database, leaf, chunk)
                if reason:
                    counts[number] += 1
                    hits.setdefault(number, _LeafDamage(0, chunk, reason)).count = counts[number]
        return hits, ""


async def _database_reason(database: ItemDatabase, leaf: LeafEntry, number: int) -> str:
    """Return what is wrong with a chunk that is read through a database; empty if nothing is."""
    region = region_of(leaf, number)
    buffer = np.empty(region.shape, parse_dtype(leaf.dtype))
    try:
        await database.read([StoredChunk(leaf, number, region)], [buffer])
        await anyio.to_thread.run_sync(partial(check_chunk, leaf, number, buffer))
    except CorruptCheckpointError:
        return "is missing, or is not what was saved"
    except CheckpointError as error:
        return f"cannot be read: {error.message:.300}"
    return ""


def _first(leaves: Sequence[LeafEntry], number: int) -> int:
    """Return the number of the leaf whose chunks leaf `number` has."""
    while (same_as := leaves[number].same_as) is not None and leaves[number].offsets:
        number = same_as
    return number
