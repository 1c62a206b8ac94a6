"""Publication by a job: what its processes have written becomes one step, or a part of one each.

The part that a process of a job takes in one item of a save, with the methods of `SoloItem`.
SharedItem             DiskItem               ProcessItem the item is   divided, one root
divided, own disks     of this process alone index, view   view, on the primary   none
none files         on the primary         on each                on each, under names of its own
leaves        merged at the end      those on this disk     those of this process
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
from msgspec.structs import replace

from ckpt._engine.memory.staging import host_bytes
from ckpt._engine.save.merged_items import WrittenTree, entry_of
from ckpt._engine.save.publication import give_name, write_manifest
from ckpt._engine.save.save_request import SaveRequest
from ckpt._engine.save.session import SaveSession
from ckpt._format.manifest import ItemEntry, Manifest
from ckpt._format.manifest_head import digest
from ckpt._format.per_process import apart, combine, own_path
from ckpt._format.step_files import StepPart, encode_part
from ckpt._job.division import Division, ProcessGroup
from ckpt._job.process_reports import (
    ProcessReport,
    SaveReport,
    check_alike,
    encode_report,
    line_fingerprint,
    same_items,
    value_fingerprint,
)
from ckpt._plan.item_reports import ItemReport
from ckpt._plan.save_plan import WHOLE
from ckpt._runtime.futures import for_each
from ckpt._runtime.threads import run_in_thread
from ckpt._tree.leaf_kinds import ARRAY_KINDS
from ckpt.errors import located
from ckpt.handlers._base import is_per_process

if TYPE_CHECKING:
    from ckpt._engine.plan_cache import ItemPlan
    from ckpt._engine.save.item_write import ItemWrite
    from ckpt._job.multihost_save import MultihostSave
    from ckpt._job.solo import Write

# Largest array that is compared if every process has it for itself: on accelerators, larger arrays
# would have to be copied to the hosts of all processes, though only the primary's are stored.
_COMPARED_BYTES = 1 << 20


def own_digests(plan: ItemPlan, leaves: Sequence[Any]) -> dict[int, str]:
    """Return the digests of the small arrays that every process has for itself, by leaf."""
    found = {}
    for number in plan.save.own:
        spec = plan.save.leaves[number].spec
        if spec.kind in ARRAY_KINDS:
            compared = spec.nbytes <= _COMPARED_BYTES
            found[number] = digest(host_bytes(leaves[number]).data) if compared else ""
    return found


def tree_report(written: WrittenTree) -> ProcessReport:
    """Return the report on a tree that this process has written."""
    assert written.report is not None
    assert written.plan.fingerprint is not None
    values = written.values or line_fingerprint([], 1)
    return ProcessReport(written.report, written.plan.fingerprint, values)


def shared_report(session: SaveSession, entries: Mapping[str, ItemEntry]) -> SaveReport:
    """Return the report of this process for the primary, which writes the manifest over it."""
    reported = {}
    for name, entry in entries.items():
        own = is_per_process(session.engine.handlers.named(entry.handler, name))
        # The primary has its own entries of the items that all processes have in common.
        reported[name] = entry if own else ItemEntry(handler=entry.handler)
    return SaveReport(reported, _trees(session), session.files)


def disk_report(session: SaveSession, entries: Mapping[str, ItemEntry]) -> SaveReport:
    """Return the report of a process with a private disk, which is only compared."""
    reported = {name: ItemEntry(handler=entry.handler) for name, entry in entries.items()}
    return SaveReport(reported, _trees(session), {})


def _trees(session: SaveSession) -> dict[str, ProcessReport]:
    return {name: tree_report(tree) for name, tree in session.trees.items()}


async def merge_entries(
    session: SaveSession,
    entries: Mapping[str, ItemEntry],
    reports: Sequence[SaveReport],
) -> dict[str, ItemEntry]:
    """Return the entries of the items over the chunks of all processes; write their indexes."""
    same_items(reports)
    found, files = await run_in_thread(
        merge_processes, entries, session.trees, reports, session.created_ns
    )
    for name, entry in entries.items():
        if is_per_process(session.engine.handlers.named(entry.handler, name)):
            with located(item=name):
                found[name] = combine([report.entries[name] for report in reports])
    for report in reports[1:]:
        session.files.update(report.files)
    await for_each(lambda path: session.write(path, files[path]), files)
    return found


def disk_entries(session: SaveSession, entries: Mapping[str, ItemEntry]) -> dict[str, ItemEntry]:
    """Return the entries of a process with a private disk."""
    process, count = session.processes.process, session.processes.count
    return {
        name: apart(entry, process, count)
        if is_per_process(session.engine.handlers.named(entry.handler, name))
        else entry
        for name, entry in entries.items()
    }


def merge_processes(
    entries: Mapping[str, ItemEntry],
    trees: Mapping[str, WrittenTree],
    reports: Sequence[SaveReport],
    created_ns: int,
) -> tuple[dict[str, ItemEntry], dict[str, bytes]]:
    """Return the entries of items over the chunks of all processes, and the files of these entries.

    Args:
        entries: The entries that the primary's handlers made.
        trees: The primary's trees of the items that are divided among the processes.
        reports: The report of every process, by its number.
        created_ns: Unix time in nanoseconds.

    Raises:
        CoordinationError: The processes saved different trees; names the first leaf.
    """
    check_alike(trees, reports)
    found = dict(entries)
    files: dict[str, bytes] = {}
    for name, written in trees.items():
        with located(item=name):
            own = [report.trees[name].written for report in reports]
            found[name] = entry_of(entries[name], written.tree, own)
            files |= written.plan.sidecars.of_places(own, created_ns)
    return found, files


def part_file(session: SaveSession, entries: Mapping[str, ItemEntry]) -> bytes:
    """Return the part file of a save.

    Args:
        session: The save, whose arrays and files are all written.
        entries: The entries that the handlers made of the items.
    """
    handlers = session.engine.handlers
    process, count = session.processes.process, session.processes.count
    apart = {
        name for name, each in entries.items() if is_per_process(handlers.named(each.handler, name))
    }
    trees = {name: _owned(tree) for name, tree in session.trees.items()}
    data = {f"{name}/{path}" for name, tree in trees.items() for path in tree.written.files}
    held = {f"{name}/{path}" for name, tree in session.trees.items() for path in _files(tree)}
    # A file that handlers write alike on all processes counts as the primary's.
    files = {
        path: file
        for path, file in session.files.items()
        if path in data or (path not in held and (process == 0 or path.partition("/")[0] in apart))
    }
    reported = {
        name: each if name in apart else ItemEntry(handler=each.handler)
        for name, each in entries.items()
    }
    report = encode_report(SaveReport(reported, trees, files))
    return encode_part(StepPart(process, count, tuple(files), report))


def _owned(tree: WrittenTree) -> ProcessReport:
    """Return the report on a tree without the chunks that another process owns.

    Its fingerprint of values covers those that every process has for itself, since an assembled
    step has them once.
    """
    whole, plan = tree_report(tree), tree.plan.save
    values = value_fingerprint(plan, tree.tree.values, _digests(whole.written, plan.own))
    return replace(whole, written=whole.written.without_chunks(plan.copies), values=values)


def _digests(report: ItemReport, leaves: Sequence[int]) -> dict[int, str]:
    """Return a digest of the bytes of each of `leaves`, made from the digests of its chunks."""
    order = np.lexsort((report.rows["number"], report.rows["leaf"]))
    found, digests = report.rows["leaf"][order], report.digests[order]
    starts, ends = (np.searchsorted(found, leaves, side) for side in ("left", "right"))
    return {
        leaf: digest(digests[start:end].tobytes())
        for leaf, start, end in zip(leaves, starts.tolist(), ends.tolist(), strict=True)
    }


def _files(tree: WrittenTree) -> tuple[str, ...]:
    assert tree.report is not None
    return tree.report.files


async def publish_together(
    processes: MultihostSave,
    session: SaveSession,
    request: SaveRequest,
    entries: Mapping[str, ItemEntry],
) -> Manifest:
    """Report to the primary, which writes the manifest over all reports, and publishes."""
    with session.recorder.phase("record"), session.hooks.watch.taking("merged"):
        reports = await processes.report(shared_report(session, entries))
        if reports is not None:
            async with processes.busy():
                entries = await merge_entries(session, entries, reports)
                manifest = await write_manifest(session, request, entries, joint=True)
            # From here on no other process can make the save fail.
            await processes.decide()
    with session.recorder.phase("publish"):
        if reports is None:
            return await processes.outcome()
        with anyio.CancelScope(shield=True):
            async with processes.busy():
                await give_name(session, request, manifest)
            await processes.conclude(manifest)
    return manifest


async def publish_apart(
    processes: MultihostSave,
    session: SaveSession,
    request: SaveRequest,
    entries: Mapping[str, ItemEntry],
) -> Manifest:
    """Write a manifest over the chunks of this process, and publish it when all are ready.

    If one process fails to publish after others have, all get its error. The published parts do not
    count as a step then, since not all processes have it.
    """
    with session.recorder.phase("record"), session.hooks.watch.taking("merged"):
        async with processes.busy():
            part = await run_in_thread(part_file, session, entries)
            entries = disk_entries(session, entries)
            manifest = await write_manifest(session, request, entries, part, joint=True)
        reports = await processes.report(disk_report(session, entries))
        if reports is not None:
            same_items(reports)
            async with processes.busy():
                await run_in_thread(check_alike, session.trees, reports)
    with session.recorder.phase("publish"):
        await processes.ready()
        # Shielded until all have published: a step counts only if all processes have it.
        with anyio.CancelScope(shield=True):
            async with processes.busy():
                await give_name(session, request)
            await processes.published()
    return manifest


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
            write.start(write.write_early_sidecars)
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
    assert written.report is not None
    return entry_of(entry, written.tree, [written.report], own_disks=own_disks)
