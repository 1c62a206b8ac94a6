"""The save of a process that has no others, with the methods of `MultihostSave`.

`JobSave` is the part that a process takes in a save, and `ItemShare` its part of one item. What
differs between one process and several is in their methods, so that the flow of a save never asks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio
from msgspec import Struct

from ckpt._engine.save.merged_items import entry_of
from ckpt._engine.save.publication import give_name
from ckpt._engine.save.step_manifest import write_manifest
from ckpt._plan.item_reports import ChunkTable
from ckpt._plan.save_plan import WHOLE

if TYPE_CHECKING:
    from ckpt._engine.save.item_write import ItemWrite
    from ckpt._engine.save.merged_items import WrittenTree
    from ckpt._engine.save.save_request import SaveRequest
    from ckpt._engine.save.session import SaveSession
    from ckpt._format.manifest import ItemEntry, Manifest
    from ckpt._job.item_shares import DiskItem, ProcessItem, SharedItem
    from ckpt._job.multihost_save import MultihostSave
    from ckpt.storage._base import Attempt, Storage

# Returns the failure of an earlier save that is to be raised, or None; each failure only once.
Take = Callable[[], BaseException | None]
# Returns the reason to refuse a save, or None.
Ask = Callable[[], Awaitable[str | None]]
# Begin an attempt; join the attempt with the given id.
Begin = Callable[[], Awaitable["Attempt"]]
Join = Callable[[str], Awaitable["Attempt"]]
# The request of a save as it is to be saved; the step directories that it replaces under other
# names; and True if the call waits for the end of the save, which may be skipped as equal.
Cleared = tuple["SaveRequest", list[str], bool]
Clear = Callable[["SaveRequest"], Awaitable[Cleared]]
# Writes a file of an item, whose path is given.
Write = Callable[[str], Awaitable[None]]


class StartedSave(Struct, frozen=True):
    """A save that has begun.

    Attributes:
        attempt: The attempt that this process writes to.
        save: Id of the attempt that the primary has begun; the same on all processes.
        created_ns: Start time of that attempt, in Unix nanoseconds.
    """

    attempt: Attempt
    save: str
    created_ns: int


class SoloSave(Struct, frozen=True):
    """The save of a process that has no others: it shares nothing and waits for no process.

    Attributes:
        budget_bytes: The staging budget.
        process: Number of this process.
        count: Number of processes.
        publishes: True: this process begins the attempt, and publishes it.
    """

    budget_bytes: int
    process: int = 0
    count: int = 1
    publishes: bool = True

    def taking_part(self, *, may_refuse: bool = False) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def busy(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def advance(self, nbytes: int) -> None:
        """Do nothing, since no process waits."""

    async def heed(self, take: Take, *, in_doubt: bool) -> None:
        """Raise the failure of an earlier save, if `take` returns one."""
        failure = take()
        if failure is not None:
            raise failure

    async def refusal(self, ask: Ask) -> str | None:
        """Return the reason to refuse the save, or None."""
        return await ask()

    async def cleared(self, storage: Storage, request: SaveRequest, clear: Clear) -> Cleared:
        """Make way for the save in its root, by `clear`."""
        return await clear(request)

    async def begin(self, begin: Begin, join: Join, created_ns: int) -> StartedSave:
        attempt = await begin()
        return StartedSave(attempt, attempt.id, created_ns)

    def item(self, name: str, *, per_process: bool) -> SoloItem:
        """Return the part that this process takes in one item: all of it."""
        return SoloItem()

    async def publish(
        self, session: SaveSession, request: SaveRequest, entries: Mapping[str, ItemEntry]
    ) -> Manifest:
        """Write the manifest, and publish the step."""
        with session.recorder.phase("record"), session.hooks.watch.taking("merged"):
            manifest = await write_manifest(session, request, entries)
        with session.recorder.phase("publish"), anyio.CancelScope(shield=True):
            await give_name(session, request, manifest)
        return manifest

    async def if_publishing(self, act: Callable[[], Awaitable[None]]) -> None:
        """Call `act`: this process publishes the save."""
        await act()

    async def discard(self, storage: Storage, attempt: Attempt) -> None:
        """Remove an attempt that is not published."""
        await storage.discard(attempt)

    async def settle(self, error: BaseException) -> BaseException:
        return error

    def was_heard(self, error: BaseException) -> bool:
        """Return False: no other process has raised the error of an earlier save."""
        return False

    def is_raised_later(self, error: BaseException) -> bool:
        """Return False: the call raises the error of its save if it has not returned."""
        return False


class SoloItem:
    """One item of a save, all of which this process writes.

    Attributes:
        division: The plan has all of it.
    """

    division = WHOLE

    async def write_file(self, path: str, write: Write) -> None:
        """Write a file of the item, by `write`."""
        await write(path)

    async def stage(
        self, session: SaveSession, write: ItemWrite, written: WrittenTree, leaves: Sequence[Any]
    ) -> None:
        """Stage the leaves of the tree, and start what else is written of it."""
        write.start(write.write_index)
        await write.stage(leaves)

    def filled(self, entry: ItemEntry, written: WrittenTree) -> ItemEntry:
        """Return the entry with the leaves of the item, which are all written."""
        tree = written.tree
        assert written.report is not None
        return entry_of(entry, tree, ChunkTable.merged(tree.leaves, [written.report]))


if TYPE_CHECKING:
    JobSave: TypeAlias = SoloSave | MultihostSave
    ItemShare: TypeAlias = SoloItem | SharedItem | DiskItem | ProcessItem
