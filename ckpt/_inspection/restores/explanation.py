"""The explanation of a restore: the reads and the memory of each process.

It follows from the manifest and from the caller's description of the devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from ckpt._format.manifest import ItemEntry
from ckpt._format.manifest_head import OWN_DISKS
from ckpt._inspection.locations import Checkpoint
from ckpt._inspection.restores.placements import (
    MOST_DEVICES,
    AsSaved,
    OnMesh,
    Placements,
    TargetMesh,
    WantedArray,
    WantedItem,
    refuse,
)
from ckpt._inspection.restores.read_volume import OtherItem, ReadVolume, RestoreExplanation
from ckpt._plan.chunk_reads import CONCURRENT_REQUESTS
from ckpt._plan.leaf_entries import check_leaves
from ckpt._settings import Staging
from ckpt._steps.opened import OpenedStep
from ckpt._tree.boxes import unboxed_names
from ckpt._tree.leaf_kinds import ARRAY_KINDS
from ckpt._tree.leaf_names import compile_pattern, suggestion
from ckpt.errors import InvalidArgumentError, UnsupportedFormatError, located

# Paths of array leaves, by number of the leaf.
_Paths = Mapping[int, str]


def explain_restore(
    checkpoint: Checkpoint,
    mesh: TargetMesh | None = None,
    *,
    processes: int | None = None,
    items: Sequence[str] = (),
    select: Sequence[str] = (),
    budget: int | None = None,
) -> RestoreExplanation:
    """Return the reads of a restore; reads nothing but the manifest.

    Args:
        checkpoint: The checkpoint to restore.
        mesh: The mesh to restore onto; None for a restore as saved.
        processes: Number of processes that the devices are divided among. None means one process
            with a mesh, and as many as have saved without a mesh.
        items: Names of items; all if there are none.
        select: Patterns of leaf paths; all leaves if there are none.
        budget: Budget of host memory of each process; None for the default of a manager on this
            machine.

    Raises:
        InvalidArgumentError: There is no such item, a pattern covers nothing, or the mesh cannot
            be divided.
        TargetMismatchError: An array cannot be cut as its spec says.
        CorruptCheckpointError: The manifest contradicts itself.
        UnsupportedFormatError: Every process has a part of the step on a disk of its own.
    """
    manifest = checkpoint.opened.manifest
    if OWN_DISKS in manifest.requires:
        raise UnsupportedFormatError(
            "every process has a part of this step on a disk of its own, and can restore that part "
            "only: there is nothing to plan",
            step=manifest.step,
        )
    entries = _entries(checkpoint, items)
    chosen = _chosen(entries, select)
    count = processes or (manifest.process_count if mesh is None else 1)
    if not 1 <= count <= MOST_DEVICES:
        raise InvalidArgumentError(
            f"{count:,} processes; expected 1 to {MOST_DEVICES:,}", step=manifest.step
        )
    placements: Placements
    if mesh is None:
        placements = AsSaved(manifest, count)
    else:
        paths = [path for numbers in chosen.values() for path in numbers.values()]
        placements = OnMesh(manifest, mesh, count, paths)
    wanted = [
        _wanted_item(name, entry, chosen[name], placements) for name, entry in entries.items()
    ]
    with located(step=manifest.step):
        refuse(placements.problems)
        capacity = Staging(budget).effective_budget
        volume = ReadVolume(
            wanted,
            count,
            capacity,
            in_memory=_in_memory(checkpoint.opened),
        )
    readers = volume.processes(placements.devices, manifest)
    leaves = volume.leaves(manifest.unnamed)
    return RestoreExplanation(
        path=checkpoint.location,
        step=manifest.step,
        mesh=None if mesh is None else mesh.axes,
        platform=_platform(entries.values()),
        arrays=sum(len(item.arrays) for item in wanted),
        nbytes=volume.nbytes,
        stored=volume.stored,
        read=sum(each.read for each in readers),
        requests=sum(each.requests for each in readers),
        shared=volume.shared,
        budget=capacity,
        concurrent=CONCURRENT_REQUESTS,
        processes=readers,
        leaves=leaves,
        advice=volume.advice(manifest),
        others=[
            OtherItem(name, entry.handler, entry.nbytes)
            for name, entry in manifest.items.items()
            if not entry.leaves and (not items or name in items)
        ],
        notes=placements.notes(),
    )


def _entries(checkpoint: Checkpoint, items: Sequence[str]) -> dict[str, ItemEntry]:
    """Return the items that have a tree, after checking their leaves."""
    manifest = checkpoint.opened.manifest
    for name in items:
        if name not in manifest.items:
            raise InvalidArgumentError(
                f"there is no item {name!r:.80}; the checkpoint has {', '.join(manifest.items)}",
                step=manifest.step,
            )
    found: dict[str, ItemEntry] = {}
    for name, entry in manifest.items.items():
        if entry.leaves and (not items or name in items):
            with located(step=manifest.step, item=None if manifest.unnamed else name):
                check_leaves(entry)
            found[name] = entry
    return found


def _chosen(entries: Mapping[str, ItemEntry], select: Sequence[str]) -> dict[str, _Paths]:
    """Return the paths of the selected arrays of each item."""
    found: dict[str, dict[int, str]] = {}
    for name, entry in entries.items():
        paths = unboxed_names(entry.nodes, entry.leaves.names)
        kinds = [form.kind in ARRAY_KINDS for form in entry.leaves.forms]
        forms = entry.leaves.form.tolist()
        found[name] = {
            number: path
            for number, (path, form) in enumerate(zip(paths, forms, strict=True))
            if kinds[form]
        }
    if not select:
        return dict(found)
    every = [path for paths in found.values() for path in paths.values()]
    covering = [(text, compile_pattern(text)) for text in select]
    for text, pattern in covering:
        if not any(pattern.covers(path) for path in every):
            raise InvalidArgumentError(
                f"--select: {text!r:.80} covers none of the {len(every)} arrays"
                f"{suggestion(text, every)}"
            )
    return {
        name: {
            number: path
            for number, path in paths.items()
            if any(pattern.covers(path) for _, pattern in covering)
        }
        for name, paths in found.items()
    }


def _wanted_item(name: str, entry: ItemEntry, paths: _Paths, placements: Placements) -> WantedItem:
    leaves = list(entry.leaves)
    arrays: list[WantedArray] = []
    known: set[int] = set()
    for number, path in paths.items():
        leaf = leaves[number]
        source = number if leaf.same_as is None else leaf.same_as
        if source in known and placements.keeps_identity:
            continue
        known.add(source)
        arrays.append(WantedArray(path, source, leaf, placements.of(name, path, leaf)))
    return WantedItem(name, leaves, arrays, [f"{name}/{path}" for path in entry.data_files])


def _platform(entries: Iterable[ItemEntry]) -> str:
    """Return the most frequent platform of the stored shardings."""
    counts = Counter(each.platform for entry in entries for each in entry.shardings)
    return counts.most_common(1)[0][0] if counts else "cpu"


def _in_memory(opened: OpenedStep) -> Collection[str]:
    """Return the data files that were read when the checkpoint was opened."""
    return () if opened.foreign is None else opened.foreign.kept
