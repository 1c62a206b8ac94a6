"""The item writer: the engine's interface for the handler of one item during a save."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import jax

from ckpt._engine.engine import SavedItem, references, saved_item
from ckpt._engine.plan_cache import ItemPlan, planned
from ckpt._engine.save.item_write import ItemWrite
from ckpt._engine.save.merged_items import ItemParts, WrittenTree
from ckpt._engine.save.save_request import SaveCall
from ckpt._engine.save.session import SaveSession, base_item, reuse_files
from ckpt._format.manifest import ItemEntry
from ckpt._format.manifest_head import FileEntry, digest
from ckpt._format.step_files import check_file_path
from ckpt._plan.save_plan import SavePlan
from ckpt._runtime.threads import run_in_thread
from ckpt._tree.leaf_specs import CheckpointLeaf
from ckpt._tree.structure import describe
from ckpt.errors import InvalidArgumentError, located
from ckpt.handlers._base import FileData

if TYPE_CHECKING:
    from ckpt._engine.chunk_extensions import NotesOfItem
    from ckpt._job.solo import ItemShare

T = TypeVar("T")

# Largest file that is hashed on the loop and written in one call.
_SMALL_BYTES = 1 << 20


class EngineItemWriter:
    """The engine's `ItemWriter` for one item of one save."""

    def __init__(
        self,
        session: SaveSession,
        call: SaveCall,
        item: str,
        parts: ItemParts | None = None,
        *,
        per_process: bool = False,
    ) -> None:
        """Write the item called `item`, or the part of it that comes with `call`.

        Args:
            session: The save.
            call: The call that the item came with.
            item: Name of the item.
            parts: The parts of the item so far, if it may have several.
            per_process: True if every process of the job stores an item of its own.
        """
        self._session = session
        self.process = session.processes.process
        self.processes = session.processes.count
        self._share: ItemShare = session.processes.item(item, per_process=per_process)
        self._call = call
        self._item = item
        self._parts = parts
        # The plan and the arrays, by which the next save recognizes arrays; see `SavedItem`.
        self._whole: SavePlan | None = None
        # What extensions note of the item, by their names.
        self._extensions: dict[str, NotesOfItem] = {}
        self._arrays: Sequence[weakref.ref[Any] | None] = ()
        # The tree, once it is staged, and its write.
        self._staged: tuple[WrittenTree, ItemWrite] | None = None

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Run a slow pure function off the engine's loop."""
        return await run_in_thread(partial(function, *args))

    async def stage(self, tree: Any, *, formatted: bool = True) -> None:
        """Stage a tree; see `ItemWriter.stage`."""
        session, parts, processes = self._session, self._parts, self._session.processes
        if self._call.caller_released.is_set():
            # The arrays are the caller's again, and so is the memory of a snapshot.
            raise InvalidArgumentError(
                "leaves are staged in Handler.stage, not in the commit that it returns"
            )
        if self._staged is not None:
            raise InvalidArgumentError("an item is one tree: its leaves were staged already")
        structure = await self.in_thread(describe, tree, True)
        began_ns = time.perf_counter_ns()
        part = 0
        async with session.planning:
            # Added before anything is staged, since a part may have no place in the tree.
            if parts is not None:
                part = await self.in_thread(parts.structure.add, structure.nodes)
            plan = await self.in_thread(
                session.plans.plan,
                self._item,
                structure,
                processes.budget_bytes,
                self._share.division,
                formatted,
                parts is None,
                session.storage.traits.largest_file_bytes,
                session.storage.traits.usual_file_bytes,
                session.engine.sidecars,
            )
            known = None
            if session.shares:
                known = await base_item(session, self._item, plan.save)
                self._arrays, self._whole = references(structure.leaves), plan.save
            expected: set[int] = set()
            for name, save in session.extensions.items():
                self._extensions[name] = await self.in_thread(
                    save.of_item, self._item, structure.nodes, structure.names
                )
            if known is not None:
                plan = await self._reuse_files(plan, known, structure.leaves)
                expected = await self.in_thread(known.expected, plan.save.batches)
        leaves: Sequence[Any] = structure.leaves
        if plan.keys:
            leaves = await self.in_thread(_with_key_data, leaves, plan.keys)
        total = sum(batch.nbytes for batch in plan.save.batches)
        session.recorder.report("plan", began_ns, time.perf_counter_ns(), total)
        session.hooks.advance(total=total)
        if plan.formatted is not None:
            session.formatted.append(plan.formatted)
        write = ItemWrite(session, self._call, self._item, plan, known, expected, self._extensions)
        written = WrittenTree(planned(structure, plan.save), plan)
        if parts is None:
            await self._share.stage(session, write, written, leaves)
        else:
            # The index over all parts is written when they have come.
            await write.stage(leaves)
        self._staged = written, write
        if parts is not None:
            parts.written[part] = written

    async def _reuse_files(
        self, plan: ItemPlan, known: SavedItem, leaves: Sequence[Any]
    ) -> ItemPlan:
        """Put files of the step before into this step if they hold arrays that are the same.

        Such arrays are the same objects, or an extension knows that they are equal.
        This happens before the caller goes on, since all other arrays have to be staged. If sharing
        files takes long in this storage, all arrays are staged, and equal ones are found later.

        Returns:
            The plan for the remaining chunks.
        """
        session, kept = self._session, None
        wanted = None
        if session.storage.traits.shares_at_once:
            same = await self.in_thread(known.same, leaves)
            for each in self._extensions.values():
                base = known.chunks.report
                same += await self.in_thread(each.unchanged, plan.save.leaves, leaves, base, same)
            wanted = await self.in_thread(known.of_leaves, same)
        if wanted is not None:
            kept = await reuse_files(session, self._item, known, wanted)
        separate = known.separate_chunks(kept)
        if kept is None and not separate:
            return plan
        rest = await self.in_thread(session.plans.rest, self._item, plan, kept, separate)
        nbytes = sum(b.nbytes for b in plan.save.batches) - sum(b.nbytes for b in rest.save.batches)
        session.hooks.advance(staged=nbytes, written=nbytes, total=nbytes)
        session.processes.advance(nbytes)
        return rest

    async def write_file(self, path: str, data: FileData) -> None:
        """Write a file of the item; see `ItemWriter.write_file`."""
        await self._share.write_file(path, partial(self._write_file, data))

    async def _write_file(self, data: FileData, path: str) -> None:
        session = self._session
        try:
            name = f"{self._item}/{check_file_path(path)}"
        except ValueError as error:
            raise InvalidArgumentError(
                f"this cannot be a file of an item: {error}", item=self._item
            ) from None
        if name in session.files:
            raise InvalidArgumentError(
                f"the file {path!r:.120} was written already", item=self._item
            )
        # Entered at once, so that the file is not written a second time meanwhile.
        session.files[name] = FileEntry(size=0, digest="")
        attempt = await session.opened()
        with memoryview(data) as raw, raw.cast("B") as view:
            nbytes = len(view)
            session.hooks.advance(staged=nbytes, total=nbytes)
            async with session.lanes.taken() as lane:
                if nbytes <= _SMALL_BYTES:
                    content = bytes(view)
                    session.files[name] = FileEntry(size=nbytes, digest=digest(content))
                    with session.recorder.phase("write", nbytes, lane):
                        await session.storage.write(attempt, name, content)
                else:
                    with session.recorder.phase("digest", nbytes, lane):
                        found = await self.in_thread(digest, view)
                    session.files[name] = FileEntry(size=nbytes, digest=found)
                    with session.recorder.phase("write", nbytes, lane):
                        await session.storage.write_block(attempt, name, view)
        session.hooks.advance(written=nbytes)
        session.processes.advance(nbytes)

    async def finish(self, entry: ItemEntry) -> ItemEntry:
        """Return the entry of the item, once all that was staged of it is durable.

        Args:
            entry: The entry that the handler made. It gets the leaves here, unless the item may
                have several writers: then it gets them at the end of the save.
        """
        if self._staged is not None:
            _, write = self._staged
            await write.digested()
            # The last batches are still being written meanwhile.
            with located(item=self._item):
                entry = await self._session.compute(self._filled, entry)
            await write.settled()
        if self._parts is not None:
            self._parts.entry = entry
        return entry

    def _filled(self, entry: ItemEntry) -> ItemEntry:
        assert self._staged is not None
        written, write = self._staged
        report = write.report()
        written.report = report
        if self._whole is not None:
            files = {path: self._session.files[f"{self._item}/{path}"] for path in report.files}
            self._session.saved[self._item] = saved_item(
                self._whole, report, self._arrays, files, write.known
            )
        return entry if self._parts is not None else self._share.filled(entry, written)


def _with_key_data(leaves: Sequence[Any], keys: Iterable[int]) -> Sequence[Any]:
    """Return the leaves, with PRNG keys replaced by their data."""
    found = list(leaves)
    for number in keys:
        # A key that comes from a checkpoint already is its data.
        if not isinstance(found[number], CheckpointLeaf):
            found[number] = jax.random.key_data(found[number])
    return found
