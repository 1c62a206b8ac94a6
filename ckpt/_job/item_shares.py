"""The part that a process of a job takes in one item of a save, with the methods of `SoloItem`.

SharedItem             DiskItem               ProcessItem
the item is   divided, one root      divided, own disks     of this process alone
index, view   view, on the primary   none                   none
files         on the primary         on each                on each, under names of its own
leaves        merged at the end      those on this disk     those of this process
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ckpt._engine.save.merged_items import entry_of
from ckpt._format.step_files.per_process import own_path
from ckpt._job.division import Division, ProcessGroup
from ckpt._job.process_reports import value_fingerprint
from ckpt._job.publication import own_digests
from ckpt._plan.item_reports import ChunkTable
from ckpt._plan.save_plan import WHOLE
from ckpt._runtime.threads import run_in_thread

if TYPE_CHECKING:
    from ckpt._engine.save.item_write import ItemWrite
    from ckpt._engine.save.merged_items import WrittenTree
    from ckpt._engine.save.session import SaveSession
    from ckpt._format.manifest import ItemEntry
    from ckpt._job.solo_save import Write


class SharedItem:
    """An item that all processes write into one root, each its chunks."""

    def __init__(self, name: str, group: ProcessGroup) -> None:
        self._name = name
        self._is_primary = group.index == 0
        self.division: Division = Division(group)

    async def write_file(self, path: str, write: Write) -> None:
        """Write a file on the primary: all processes have the same one."""
        if self._is_primary:
            await write(path)

    async def stage(
        self, session: SaveSession, write: ItemWrite, written: WrittenTree, leaves: Sequence[Any]
    ) -> None:
        """Stage the leaves, and note the digests of those that all processes must have alike.

        The primary writes the view now, and the index when all have reported.
        """
        if self._is_primary:
            write.start(write.write_view)
        await write.stage(leaves)
        written.own = await run_in_thread(own_digests, written.plan, leaves)
        session.trees[self._name] = written

    def filled(self, entry: ItemEntry, written: WrittenTree) -> ItemEntry:
        """Return the entry: it gets the leaves when the chunks of all processes are known."""
        tree = written.tree
        written.values = value_fingerprint(written.plan.save, tree.values, written.own)
        return entry


class DiskItem:
    """An item of which each process writes what it holds, on its own disk."""

    def __init__(self, name: str, group: ProcessGroup) -> None:
        self._name = name
        self.division: Division = Division(group)

    async def write_file(self, path: str, write: Write) -> None:
        await write(path)

    async def stage(
        self, session: SaveSession, write: ItemWrite, written: WrittenTree, leaves: Sequence[Any]
    ) -> None:
        """Stage the leaves. A disk has no files for other readers: they would find zeros there."""
        await write.stage(leaves)
        session.trees[self._name] = written

    def filled(self, entry: ItemEntry, written: WrittenTree) -> ItemEntry:
        """Return the entry with the leaves; chunks may be on other disks."""
        return _filled(entry, written, own_disks=True)


class ProcessItem:
    """An item that every process stores for itself.

    Attributes:
        division: The plan has all of it.
    """

    division = WHOLE

    def __init__(self, process: int, count: int) -> None:
        self._process = process
        self._count = count

    async def write_file(self, path: str, write: Write) -> None:
        """Write a file under a name of this process."""
        await write(own_path(path, self._process, self._count))

    async def stage(
        self, session: SaveSession, write: ItemWrite, written: WrittenTree, leaves: Sequence[Any]
    ) -> None:
        """Stage the leaves; such an item keeps what it stores in files, and has none."""
        await write.stage(leaves)

    def filled(self, entry: ItemEntry, written: WrittenTree) -> ItemEntry:
        """Return the entry with the leaves of this process."""
        return _filled(entry, written, own_disks=False)


def _filled(entry: ItemEntry, written: WrittenTree, *, own_disks: bool) -> ItemEntry:
    tree = written.tree
    assert written.report is not None
    stored = ChunkTable.merged(tree.leaves, [written.report], own_disks=own_disks)
    return entry_of(entry, tree, stored)
