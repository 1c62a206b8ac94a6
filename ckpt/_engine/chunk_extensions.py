"""The interface of extensions that note something about the chunks of arrays.

    ChunkExtension   one manager      begin_save   committed   after_save
      NotesOfSave    one save         of_item   check_items
        NotesOfItem  one item of it   unchanged   begin   records   finish
    ReadCheck        one `verify`     of_chunk   add   problems

`records` are made for each staged batch, beside its digests. They go with the places of the chunks
through the reports of processes, and a `StoredExtension` (`ckpt/extensions/_readers.py`) makes
columns of the manifest of them. A check of restored arrays is a function,
`ckpt.extensions.device_check`. A save without extensions calls nothing of this. docs/design/018 has
the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from ckpt._format.chunk_locations import ChunkLocation
from ckpt._format.leaf_table import LeafEntry
from ckpt._format.manifest import Manifest, Node
from ckpt._plan.chunking import LeafPlan
from ckpt._plan.item_reports import ChunkNotes, ItemReport
from ckpt._plan.write_batches import Chunk, WriteBatch

Array = np.ndarray[Any, Any]
# Takes the next bytes of a chunk.
Take = Callable[[memoryview], object]


class NotesOfItem(Protocol):
    """The notes on one item of one save, or on a part of it. Called in worker threads.

    Attributes:
        none: Notes on no chunk.
    """

    @property
    def none(self) -> ChunkNotes: ...

    def unchanged(
        self,
        plans: Sequence[LeafPlan],
        leaves: Sequence[Any],
        base: ItemReport,
        same: Sequence[int],
    ) -> list[int]:
        """Return leaves that hold the same values as in the step before, so that none is staged.

        Args:
            plans: The plans of all leaves.
            leaves: The leaves.
            base: The report of this process on the step before.
            same: Numbers of the leaves that are known to be the same; they are left out.
        """

    def begin(
        self,
        plans: Sequence[LeafPlan],
        leaves: Sequence[Any],
        base: ItemReport | None,
        same: Sequence[int],
    ) -> None:
        """Begin, before anything is staged and before the caller goes on and donates its arrays.

        Args:
            plans: The plans of all leaves.
            leaves: The leaves.
            base: The report of this process on the step before; None without any.
            same: Numbers of the leaves that are the same arrays as then, and are not staged.
        """

    def records(
        self, batch: WriteBatch, bytes_of: Callable[[Chunk], Array], takes: Sequence[Take]
    ) -> Array:
        """Return a record for each chunk of a staged batch.

        Args:
            batch: The batch.
            bytes_of: Returns the bytes of a chunk, in C order and without padding; `[n] uint8`.
            takes: For each chunk a function that takes all of its bytes, in order. It is called
                here, so that each byte is read from memory once.
        """

    def finish(self, report: ItemReport, base: ItemReport | None, process: int) -> ChunkNotes:
        """Return the notes on all chunks of this process, once all are digested; may warn.

        Args:
            report: The chunks, with the records of `records` and of the chunks of `base` in it.
            base: The report on the step before; None without any.
            process: Number of this process.
        """


class NotesOfSave(Protocol):
    """The notes on one save."""

    def of_item(self, item: str, nodes: Sequence[Node], names: Sequence[str]) -> NotesOfItem:
        """Return the notes on an item, which has these nodes and stored names of leaves."""

    def check_items(self) -> None:
        """Raise an error if the items are not what the extension expects; all are staged."""


class TakesBytes(Protocol):
    """Takes the bytes of one chunk that is read."""

    def update(self, data: memoryview, /) -> object:
        """Take the next bytes, without padding."""

    def sums(self) -> Any:
        """Return what `ReadCheck.add` takes of the chunk, at its end."""


class ReadCheck(Protocol):
    """A check of the bytes of a step while `verify` reads them."""

    def of_chunk(self, leaf: LeafEntry, place: ChunkLocation) -> TakesBytes:
        """Return what takes the bytes of a chunk."""

    def add(self, item: str, chunks: Iterable[tuple[int, Any]]) -> None:
        """Add the sums of chunks whose digests are right, with the numbers of their leaves."""

    def problems(self, manifest: Manifest) -> Iterable[tuple[str | None, str | None, str]]:
        """Yield item, leaf and fault of each leaf that is wrong, or neither for the whole step."""


class ChunkExtension(Protocol):
    """An extension of one manager, or of one call.

    Attributes:
        name: Name of its notes in reports.
    """

    @property
    def name(self) -> str: ...

    def begin_save(self) -> NotesOfSave:
        """Begin a save."""

    def committed(self, manifest: Manifest, where: str) -> None:
        """Look at the manifest of a published step; `where` is its path."""

    async def after_save(self, goes_on: Callable[[], bool]) -> None:
        """Work while nobody waits, as long as `goes_on` returns True; on the engine's loop."""
