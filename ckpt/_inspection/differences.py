"""The differences between two checkpoints, from their manifests alone.

Digests are of the logical bytes of a chunk. Arrays with equal chunk shapes are therefore compared
without reading them, even if they are compressed differently. If the chunk shapes differ, vital
signs are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from ckpt._format.leaf_table import LeafForm, LeafTable
from ckpt._format.manifest import Manifest
from ckpt._format.manifest_head import flat_metrics
from ckpt._inspection.leaf_records import LeafRecord, records_of
from ckpt._inspection.locations import Checkpoint
from ckpt._plan.compared_leaves import ComparedLeaves, Verdict, compare_leaves, contents_of
from ckpt._tree.boxes import unboxed_names
from ckpt._vitals.signs import LeafSigns
from ckpt._vitals.stored_signs import signs_in
from ckpt.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from ckpt._inspection.values.read_differences import ArrayChange


class ChangedText(Struct, frozen=True):
    """A changed value that is not an array; a side without the value is None.

    Attributes:
        item: The item that the value is in; empty if the checkpoint is one unnamed object.
        name: Leaf path, name of a metric, or path of a value in the metadata.
        before: The value in the first checkpoint.
        after: The value in the second checkpoint.
    """

    item: str
    name: str
    before: str | None
    after: str | None


class ComparedArray(Struct, frozen=True):
    """An array of the same dtype and shape in both, with other or unknown contents.

    Attributes:
        leaf: The array in the first checkpoint.
        chunks: Number of its chunks there.
        chunks_changed: Number of chunks with other digests; None if digests do not tell.
        change: Difference of the values; None if they were not read.
        signs: The vital signs in the first and in the second checkpoint; None if one has none, and
            for a PRNG key, for which they mean nothing.
    """

    leaf: LeafRecord
    chunks: int
    chunks_changed: int | None
    change: ArrayChange | None = None
    signs: tuple[LeafSigns, LeafSigns] | None = None

    @property
    def norm_change(self) -> float | None:
        """Change of the norm, relative to the first norm; None if a norm is unknown.

        This is not a distance between the arrays: arrays of one norm may have nothing in common.
        """
        if self.signs is None:
            return None
        before, after = (each.norm for each in self.signs)
        if before == after:
            return 0.0
        return (after - before) / before if before else math.inf


class CheckpointDifferences(Struct, frozen=True):
    """The differences between two checkpoints.

    Attributes:
        before, after: Paths of the checkpoints.
        steps: Their step numbers, or None.
        is_same: True if the checkpoints are known to be the same.
        removed: Leaves that only the first has.
        added: Leaves that only the second has.
        types: Leaves of another dtype, shape or kind.
        values: Leaves that are not arrays and have another value.
        items: Items that were saved by another handler, with other containers or other files.
        contents: Arrays with other contents; if values were read, the largest changes first.
        not_compared: Arrays that have other chunks, or no digests, and no vital signs, and were not
            read.
        metrics: Metrics that differ.
        metadata: Values of the user's metadata that differ.
        same: Number of leaves that are the same.
        values_read: True if values were read.
        same_by_fingerprint: Arrays counted in `same` that only fingerprints call the same, as
            digests do not tell. By chance, though improbably, other contents may have the same
            fingerprint.
    """

    before: str
    after: str
    steps: tuple[int | None, int | None]
    is_same: bool
    removed: list[LeafRecord]
    added: list[LeafRecord]
    types: list[ChangedText]
    values: list[ChangedText]
    items: list[ChangedText]
    contents: list[ComparedArray]
    not_compared: list[ComparedArray]
    metrics: list[ChangedText]
    metadata: list[ChangedText]
    same: int
    values_read: bool = False
    same_by_fingerprint: list[LeafRecord] = []


class PairedArray(Struct, frozen=True):
    """An array of one type in both checkpoints that digests do not call the same.

    Attributes:
        item: Name in the manifests of the item that the array is in.
        compared: The comparison of the array by the manifests.
        verdict: The conclusion from it.
        numbers: Numbers of the array among the leaves of the item, in both checkpoints.
        form: Its form in the first checkpoint.
    """

    item: str
    compared: ComparedArray
    verdict: Verdict
    numbers: tuple[int, int]
    form: LeafForm


_Manifests = tuple[Manifest, Manifest]


def compare(
    before: Checkpoint, after: Checkpoint
) -> tuple[CheckpointDifferences, list[PairedArray]]:
    """Return the differences between two checkpoints, and the arrays that may differ.

    These arrays have one type in both, and digests do not call them the same. Leaves are in the
    order of their trees.

    Raises:
        CorruptCheckpointError: A manifest contradicts itself.
    """
    manifests = before.opened.manifest, after.opened.manifest
    leaves = _compared_leaves(before, after)
    removed = _left_over(manifests[0], {name: each.removed for name, each in leaves.items()})
    added = _left_over(manifests[1], {name: each.added for name, each in leaves.items()})
    types: list[ChangedText] = []
    values: list[ChangedText] = []
    pairs: list[PairedArray] = []
    for name, each in leaves.items():
        types += _texts(manifests, name, each, Verdict.OTHER_TYPE)
        values += _texts(manifests, name, each, Verdict.OTHER_VALUE)
        pairs += _unlike_arrays(manifests, name, each)
    contents, unknown, alike = (
        [pair.compared for pair in pairs if pair.verdict is verdict]
        for verdict in (Verdict.CHANGED, Verdict.UNKNOWN, Verdict.SAME_BY_FINGERPRINT)
    )
    items = list(_items(manifests, {each.item for each in (*removed, *added)}))
    metrics = [ChangedText("", *each) for each in _unlike(*map(_metrics, manifests))]
    metadata = [ChangedText("", *each) for each in _unlike(*map(_metadata, manifests))]
    lists = (removed, added, types, values, items, contents, unknown, metrics, metadata)
    found = CheckpointDifferences(
        before.location,
        after.location,
        (manifests[0].step, manifests[1].step),
        not any(lists),
        removed,
        added,
        types,
        values,
        items,
        contents,
        unknown,
        metrics,
        metadata,
        sum(each.same for each in leaves.values()),
        same_by_fingerprint=[each.leaf for each in alike],
    )
    return found, pairs


def is_same_state(before: Checkpoint, after: Checkpoint) -> bool | None:
    """Return True if leaves and items are the same; None if none differs and some are unknown.

    Metrics and metadata are not compared.

    Raises:
        CorruptCheckpointError: A manifest contradicts itself.
    """
    manifests = before.opened.manifest, after.opened.manifest
    if next(_items(manifests, set()), None) is not None:
        return False
    found = {each.is_same for each in _compared_leaves(before, after).values()}
    return False if False in found else None if None in found else True


def largest_first(arrays: Sequence[ComparedArray]) -> list[ComparedArray]:
    """Return arrays by the relative change of their norms, the largest first.

    Arrays with another number of non-finite values come before all others; arrays without vital
    signs come last.
    """

    def weight(each: ComparedArray) -> tuple[bool, float]:
        nonfinite = {signs.nonfinite for signs in each.signs or ()}
        change = each.norm_change
        return len(nonfinite) > 1, -1.0 if change is None else abs(change)

    return sorted(arrays, key=weight, reverse=True)


def _compared_leaves(before: Checkpoint, after: Checkpoint) -> dict[str, ComparedLeaves]:
    first, second = (each.opened.manifest.items for each in (before, after))
    paths, others = _paths(before), _paths(after)
    return {
        name: compare_leaves(item.leaves, paths[name], second[name].leaves, others[name])
        for name, item in first.items()
        if name in second
    }


def _paths(checkpoint: Checkpoint) -> dict[str, Sequence[str]]:
    """Return the paths of the leaves of all items.

    Raises:
        CorruptCheckpointError: The nodes of an item are not a tree; names the checkpoint.
    """
    manifest = checkpoint.opened.manifest
    found = {}
    for name, item in manifest.items.items():
        try:
            found[name] = unboxed_names(item.nodes, item.leaves.names)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(
                f"{checkpoint.location}: {error.message}",
                step=manifest.step,
                item=None if manifest.unnamed else name,
            ) from error
    return found


def _left_over(manifest: Manifest, alone: Mapping[str, Sequence[int]]) -> list[LeafRecord]:
    """Return the leaves that only `manifest` has, with all leaves of items that only it has."""
    return [
        record
        for name, item in manifest.items.items()
        for record in records_of(manifest, name, alone.get(name, range(len(item.leaves))))
    ]


def _texts(
    manifests: _Manifests, name: str, leaves: ComparedLeaves, verdict: Verdict
) -> Iterator[ChangedText]:
    pairs = leaves.pairs[leaves.verdicts == verdict]
    text = _type_text if verdict is Verdict.OTHER_TYPE else _value_text
    columns = [
        [
            (record, text(manifest.items[name].leaves, number, record))
            for number, record in zip(numbers, records_of(manifest, name, numbers), strict=True)
        ]
        for manifest, numbers in zip(manifests, pairs.T.tolist(), strict=True)
    ]
    for (record, before), (_, after) in zip(*columns, strict=True):
        yield ChangedText(record.item, record.path, before, after)


def _type_text(table: LeafTable, number: int, record: LeafRecord) -> str:
    impl = table.forms[int(table.form[number])].impl
    return record.type_text if impl is None else f"{record.type_text} of {impl}"


def _value_text(table: LeafTable, number: int, record: LeafRecord) -> str:
    return str(table.values.get(number)) if record.value is None else record.value


def _unlike_arrays(
    manifests: _Manifests, name: str, leaves: ComparedLeaves
) -> Iterator[PairedArray]:
    chosen = (leaves.verdicts > Verdict.SAME) & (leaves.verdicts <= Verdict.UNKNOWN)
    numbers = leaves.pairs[chosen].tolist()
    tables = [manifest.items[name].leaves for manifest in manifests]
    signs = [signs_in(table) for table in tables]
    records = records_of(manifests[0], name, [first for first, _ in numbers])
    verdicts, changed = leaves.verdicts[chosen].tolist(), leaves.chunks_changed[chosen].tolist()
    for (first, second), record, verdict, chunks in zip(
        numbers, records, verdicts, changed, strict=True
    ):
        form = tables[0].forms[int(tables[0].form[first])]
        before, after = (
            None if form.kind == "key" else each.of(number)
            for each, number in zip(signs, (first, second), strict=True)
        )
        compared = ComparedArray(
            record,
            form.count,
            None if chunks < 0 else chunks,
            signs=None if before is None or after is None else (before, after),
        )
        yield PairedArray(name, compared, Verdict(verdict), (first, second), form)


def _items(manifests: _Manifests, resized: set[str]) -> Iterator[ChangedText]:
    """Yield the items that differ in more than their leaves."""
    first, second = manifests
    for name in dict.fromkeys((*first.items, *second.items)):
        shown = "" if first.unnamed and second.unnamed else name
        texts = [
            "" if name not in each.items else f"saved by {each.items[name].handler}"
            for each in manifests
        ]
        if texts[0] != texts[1]:
            yield ChangedText(shown, "", texts[0] or None, texts[1] or None)
            continue
        entries = first.items[name], second.items[name]
        has_tree = any(each.nodes or len(each.leaves) for each in entries)
        if has_tree and shown not in resized and entries[0].nodes != entries[1].nodes:
            yield ChangedText(shown, "", "these containers", "other containers")
        if not has_tree and contents_of(first, name) != contents_of(second, name):
            yield ChangedText(shown, "", "these contents", "other contents")


def _metrics(manifest: Manifest) -> dict[str, str]:
    return {name: repr(value) for name, value in flat_metrics(manifest.metrics).items()}


def _metadata(manifest: Manifest) -> dict[str, str]:
    """Return the values of the metadata as JSON, by the path of keys that leads to each."""
    return dict(_values(manifest.metadata, "")) if manifest.metadata is not None else {}


def _values(value: Any, above: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            # Escaped, so that no single key looks like two.
            escaped = str(key).replace("~", "~0").replace("/", "~1")
            yield from _values(each, f"{above}/{escaped}" if above else escaped)
    else:
        yield above, msgspec.json.encode(value).decode()


def _unlike(
    before: Mapping[str, str], after: Mapping[str, str]
) -> Iterator[tuple[str, str | None, str | None]]:
    for name in dict.fromkeys((*before, *after)):
        if before.get(name) != after.get(name):
            yield name, before.get(name), after.get(name)
