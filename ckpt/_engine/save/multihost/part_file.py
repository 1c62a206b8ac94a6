"""The part file of a process with a private disk: its contribution to the assembled step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec.structs import replace

from ckpt._engine.save.merged_items import WrittenTree
from ckpt._engine.save.multihost.save_report import SaveReport, encode_report
from ckpt._engine.save.session import SaveSession
from ckpt._format.digests import digest
from ckpt._format.manifest import ItemEntry
from ckpt._format.step_files.step_part import StepPart, encode_part
from ckpt._plan.item_reports import ItemReport
from ckpt._plan.multihost.process_reports import ProcessReport
from ckpt._plan.multihost.tree_fingerprint import value_fingerprint
from ckpt.handlers._base import is_per_process


def part_file(session: SaveSession, entries: Mapping[str, ItemEntry]) -> bytes:
    """Return the part file of a save.

    Args:
        session: The save, whose arrays and files are all written.
        entries: The entries that the handlers made of the items.
    """
    group, handlers = session.processes.group, session.engine.handlers
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
        if path in data
        or (path not in held and (group.index == 0 or path.partition("/")[0] in apart))
    }
    reported = {
        name: each if name in apart else ItemEntry(handler=each.handler)
        for name, each in entries.items()
    }
    report = encode_report(SaveReport(reported, trees, files))
    return encode_part(StepPart(group.index, group.count, tuple(files), report))


def _owned(tree: WrittenTree) -> ProcessReport:
    """Return the report on a tree without the chunks that another process owns.

    Its fingerprint of values covers those that every process has for itself, since an assembled
    step has them once.
    """
    whole, plan = tree.for_primary(), tree.plan.save
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
