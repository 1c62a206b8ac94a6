"""The joined step: the parts that the processes of a job saved apart, as one step. Pure.

Each process has reported the chunks that it owns. The reports and the manifest of process 0, which
has the tree, contain everything that a shared save knows when it writes its manifest. The same code
makes the same files from them: entries over all chunks, and the files for other readers. No array
byte is read, and no device is used.

The planned tree of a stored item: the plans with which its leaves were saved. Pure. The plans
follow from the manifest, except for the settings of a compression: the manifest has only its name,
and readers need no more. No device is used.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from ckpt._engine.save.merged_items import entry_of
from ckpt._engine.save.publication import encode_manifest
from ckpt._format.array_format import compression_of, zarr_metadata_bytes
from ckpt._format.leaf_table import LeafForm
from ckpt._format.manifest import ItemEntry, Manifest, features
from ckpt._format.manifest_head import FileEntry, digest
from ckpt._format.per_process import combine, is_combined
from ckpt._format.regions import Region, chunk_grid
from ckpt._interop.orbax.sidecars import OrbaxSidecars
from ckpt._job.process_reports import SaveReport, check_alike, decode_report, same_items
from ckpt._plan.chunking import LeafPlan
from ckpt._plan.item_reports import PlannedTree
from ckpt._plan.leaf_entries import check_leaves
from ckpt._tree.leaf_kinds import ARRAY_KINDS, CALLABLE, MOST_SHOWN, decode_scalar, scalar_array
from ckpt._tree.leaf_specs import CheckpointLeaf, LeafSpec
from ckpt.errors import CheckpointError, CorruptCheckpointError, located
from ckpt.extensions._readers import notes_on_step


def planned_tree(entry: ItemEntry) -> PlannedTree:
    """Return the tree of an item with the plans of its leaves.

    Args:
        entry: The entry of the item in the manifest of any process that saved it; may lack chunks.

    Raises:
        CorruptCheckpointError: The entry contradicts itself.
    """
    check_leaves(entry)
    table = entry.leaves
    # Thousands of leaves have one of a few forms, so plans are made by form.
    arrays = {
        number: _array_plan(form, entry)
        for number, form in enumerate(table.forms)
        if form.kind in ARRAY_KINDS
    }
    leaves = []
    values: list[object] = []
    for number, (name, form) in enumerate(zip(table.names, table.form.tolist(), strict=True)):
        value = None
        if form in arrays:
            like = arrays[form]
        elif table.forms[form].kind == CALLABLE:
            like = _plan(LeafSpec(CALLABLE))
            value = CheckpointLeaf(like.spec, _nothing, str(table.values.get(number)))
        else:
            kind = table.forms[form].kind
            value = decode_scalar(table.bare(number))
            array = scalar_array(kind, value) if len(table.values) <= MOST_SHOWN else None
            like = _plan(LeafSpec(kind, None if array is None else array.dtype.name), packed=True)
        spec = like.spec
        if number in table.same_as:
            spec = replace(spec, same_as=table.same_as[number])
        leaves.append(replace(like, name=name, spec=spec))
        values.append(value)
    return PlannedTree(entry.nodes, leaves, values)


def _array_plan(form: LeafForm, entry: ItemEntry) -> LeafPlan:
    """Return the plan of all arrays of a form; it has no name."""
    spec = LeafSpec(
        form.kind,
        form.dtype,
        form.shape,
        None,
        form.committed,
        form.weak_type,
        form.impl,
        placed=None if form.sharding is None else entry.shardings[form.sharding],
    )
    return _plan(spec, form.chunks, packed=form.packed, codec=form.codec)


def _plan(
    spec: LeafSpec, chunk: tuple[int, ...] = (), *, packed: bool = False, codec: str | None = None
) -> LeafPlan:
    if spec.dtype is None:
        return LeafPlan("", spec, (), (), packed=False, metadata=None)
    compression = None if codec is None else compression_of(codec)
    document = zarr_metadata_bytes(spec.shape, chunk, spec.dtype, compression)
    return LeafPlan("", spec, chunk, chunk_grid(spec.shape, chunk), packed, document, compression)


def _nothing(region: Region) -> np.ndarray[tuple[int, ...], np.dtype[np.void]]:
    raise AssertionError("a function has no array")


class AssemblyTarget(Struct, frozen=True):
    """The place of the joined step.

    Attributes:
        step_dir: Name of its directory.
        attempt: Id of the attempt that writes it.
        folder: Folder of the step directory that holds its files; see `Manifest.folder`.
    """

    step_dir: str
    attempt: str
    folder: str = ""


class AssembledStep(Struct, frozen=True):
    """A step of all processes.

    Attributes:
        manifest: Its manifest.
        encoded: Bytes of the manifest.
        files: Contents of the files that no process has, by path; the manifest lists them, too.
    """

    manifest: Manifest
    encoded: bytes
    files: dict[str, bytes]


def assemble_step(
    first: Manifest, reports: Sequence[bytes], place: AssemblyTarget
) -> AssembledStep:
    """Return the step that consists of the parts of all processes.

    Args:
        first: The manifest of the part of process 0.
        reports: Reports of the processes about their parts, by number; see `StepPart.report`.
        place: The place of the step.

    Raises:
        CoordinationError: The processes have saved different trees or items; names a process.
        CorruptCheckpointError: A report, or the manifest, is damaged; names the process.
        CheckpointError: The parts do not make one step: a chunk is in none of them or in several,
            or a part has other items or files than it reports. Names the leaf and the chunk, or the
            process.
        InvalidArgumentError: The manifest of the step would be too large.
    """
    with located(step=first.step):
        found = _read(first, reports)
        items, files = _assemble_items(first, found)
        entries = _files_of(found, {each.item for each in first.dropped})
        manifest = replace(
            first,
            requires=features(items, place.folder),
            attempt=place.attempt,
            folder=place.folder,
            items=items,
            files=entries,
            extensions=notes_on_step(items, first.extensions, "joint"),
        )
        sidecars = OrbaxSidecars(one_shot=first.step is None)
        files |= sidecars.of_step(place.step_dir, manifest)
        entries |= {
            path: FileEntry(size=len(data), digest=digest(data)) for path, data in files.items()
        }
        return AssembledStep(manifest, encode_manifest(manifest), files)


def _read(first: Manifest, reports: Sequence[bytes]) -> list[SaveReport]:
    """Return the reports, after checking that their items fit the manifest and each other."""
    if len(reports) != first.process_count:
        raise CheckpointError(
            f"it was saved by {first.process_count} processes, and {len(reports)} have reported "
            "their parts: one report of each is needed"
        )
    found = []
    for process, data in enumerate(reports):
        try:
            found.append(decode_report(data))
        except CheckpointError as error:
            raise CorruptCheckpointError(f"process {process}: {error.message}") from error
    same_items(found)
    saved = {*first.items, *(each.item for each in first.dropped)}
    if found[0].entries.keys() != saved:
        raise CheckpointError(
            f"the manifest of process 0 has the items {_list_names(saved)}, and its report "
            f"{_list_names(found[0].entries)}: they are not of one save"
        )
    return found


def _assemble_items(
    first: Manifest, reports: Sequence[SaveReport]
) -> tuple[dict[str, ItemEntry], dict[str, bytes]]:
    """Return the entries of all items, and their files for other readers."""
    items: dict[str, ItemEntry] = {}
    files: dict[str, bytes] = {}
    for name, entry in first.items.items():
        with located(item=name):
            items[name], made = _assemble_item(name, entry, reports, first)
        files |= made
    return items, files


def _assemble_item(
    name: str, entry: ItemEntry, reports: Sequence[SaveReport], first: Manifest
) -> tuple[ItemEntry, dict[str, bytes]]:
    is_tree = bool(entry.nodes or len(entry.leaves))
    if is_tree != (name in reports[0].trees):
        raise CheckpointError(
            "it is a tree in only one of the manifest and the report of process 0: they are not of "
            "one save"
        )
    if not is_tree:
        if is_combined(entry):
            entry = combine([report.entries[name] for report in reports])
        return entry, {}
    check_alike([name], reports)
    for process, report in enumerate(reports):
        _check_files(name, process, report)
    written = [report.trees[name].written for report in reports]
    tree = planned_tree(entry)
    found = entry_of(entry, tree, written)
    beside = OrbaxSidecars(one_shot=first.step is None).of_tree(name, tree)
    files = {path: data for path, (data, _) in beside.of_structure().items()}
    # The entry of process 0 already counts all arrays.
    found = replace(found, nbytes=entry.nbytes)
    return found, files | beside.of_places(written, first.created_ns)


def _check_files(name: str, process: int, report: SaveReport) -> None:
    """Check that a process has the data files of its chunks."""
    for path in report.trees[name].written.files:
        if f"{name}/{path}" not in report.files:
            raise CheckpointError(
                f"process {process} says that it has chunks in {path!r:.60}, which is not among "
                "the files of its part"
            )


def _files_of(reports: Sequence[SaveReport], dropped: Collection[str]) -> dict[str, FileEntry]:
    """Return the files of all parts, except those of items that the step has lost."""
    found: dict[str, FileEntry] = {}
    owners: dict[str, int] = {}
    for process, report in enumerate(reports):
        for path, file in report.files.items():
            if path.partition("/")[0] in dropped:
                continue
            if path in found:
                raise CheckpointError(
                    f"the parts of the processes {owners[path]} and {process} both have the file "
                    f"{path!r:.200}: expected one of them alone"
                )
            found[path], owners[path] = file, process
    return found


def _list_names(names: Collection[str]) -> str:
    return ", ".join(f"{name!r:.60}" for name in sorted(names)) or "none"
