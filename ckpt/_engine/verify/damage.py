"""The meaning of a damaged file: the arrays that it hits, and the parts that can still be restored.

The role of a file follows from its name and the manifest: array data, a part of the database, a
file of a handler, or a file for other readers. Every chunk in a damaged data file is checked by
itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

from msgspec import Struct

from ckpt._engine.verify.file_roles import role_of
from ckpt._engine.verify.report import Problem
from ckpt._engine.verify.scanner import Scanner
from ckpt._format.chunk_locations import ChunkLocation, places_in
from ckpt._format.leaf_table import UNCHECKED, LeafEntry
from ckpt._format.manifest import ItemEntry
from ckpt._runtime.threads import run_in_thread
from ckpt._tree.boxes import unboxed_names
from ckpt.errors import CheckpointError, CorruptCheckpointError

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
        self._names: Sequence[str] = ()
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
            yield Problem(damage.path, self._name, self._name_of(number), message)

    def _name_of(self, number: int) -> str:
        if not self._names:
            stored = self._item.leaves.names
            try:
                self._names = unboxed_names(self._item.nodes, stored)
            except CorruptCheckpointError:
                self._names = stored
        return self._names[number]

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
