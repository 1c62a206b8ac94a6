"""How two checkpoints differ, from their manifests alone.

Digests are of the logical bytes of a chunk, so that arrays with the same chunks are compared
without reading them, however they are compressed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from ckpt._format.leaf_table import UNCHECKED, LeafEntry
from ckpt._format.manifest import ItemEntry, Manifest
from ckpt._format.metrics import flat_metrics
from ckpt._inspection.leaf_records import LeafRecord, leaf_records
from ckpt._inspection.places import Checkpoint

if TYPE_CHECKING:
    from ckpt._inspection.values.array_changes import ArrayChange


class ChangedText(Struct, frozen=True):
    """Something that is not an array and is another one; None where one side does not have it.

    Attributes:
        item: The item that it is in; empty where the checkpoint is one unnamed object.
        name: Leaf path, or the name of a metric, or the path of a value in the metadata.
        before: What it is in the first checkpoint.
        after: What it is in the second.
    """

    item: str
    name: str
    before: str | None
    after: str | None


class ComparedArray(Struct, frozen=True):
    """An array of the same dtype and shape in both, with other contents or contents not known.

    Attributes:
        leaf: What it is in the first checkpoint.
        chunks: How many chunks it has there.
        chunks_changed: How many of them have other digests; None where digests do not tell.
        change: How much the values differ; None where they were not read.
    """

    leaf: LeafRecord
    chunks: int
    chunks_changed: int | None
    change: ArrayChange | None = None


class CheckpointDifferences(Struct, frozen=True):
    """How two checkpoints differ.

    Attributes:
        before, after: Where they are.
        steps: Their numbers, or None.
        is_same: Whether they are known to be the same.
        removed: Leaves that only the first has.
        added: Leaves that only the second has.
        types: Leaves of another dtype, shape or kind.
        values: Leaves that are no arrays, with another value.
        items: Items that were saved by another handler, with other containers or other files.
        contents: Arrays with other contents; with values read, the largest changes first.
        not_compared: Arrays that have other chunks, or no digests, and were not read.
        metrics: Metrics that differ.
        metadata: Values of the user's metadata that differ.
        same: How many leaves are the same.
        values_read: Whether values were read.
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


class PairedLeaf(Struct, frozen=True):
    """A leaf that both checkpoints have.

    Attributes:
        item: The item that it is in, as the manifests name it.
        records: What it is.
        numbers: Its numbers among the leaves of the item.
        entries: Its entries.
    """

    item: str
    records: tuple[LeafRecord, LeafRecord]
    numbers: tuple[int, int]
    entries: tuple[LeafEntry, LeafEntry]


def compare(
    before: Checkpoint, after: Checkpoint
) -> tuple[CheckpointDifferences, dict[str, PairedLeaf]]:
    """Return how two checkpoints differ, and their arrays that digests do not call the same.

    These are by `key_of` of their record in the first checkpoint.
    """
    manifests = before.opened.manifest, after.opened.manifest
    first, second = map(_leaves, manifests)
    removed = [record for key, (record, _) in first.items() if key not in second]
    added = [record for key, (record, _) in second.items() if key not in first]
    types: list[ChangedText] = []
    values: list[ChangedText] = []
    contents: list[ComparedArray] = []
    unknown: list[ComparedArray] = []
    unlike: dict[str, PairedLeaf] = {}
    same = 0
    for pair in _pairs(manifests, first, second):
        record = pair.records[0]
        texts = _type_text(pair, 0), _type_text(pair, 1)
        if texts[0] != texts[1]:
            types.append(ChangedText(record.item, record.path, *texts))
        elif not record.is_array:
            if pair.entries[0].value == pair.entries[1].value:
                same += 1
            else:
                texts = _value_text(pair, 0), _value_text(pair, 1)
                values.append(ChangedText(record.item, record.path, *texts))
        else:
            changed = _chunks_changed(pair)
            if changed == 0:
                same += 1
                continue
            compared = ComparedArray(record, len(pair.entries[0].digests), changed)
            (unknown if changed is None else contents).append(compared)
            unlike[key_of(record)] = pair
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
        same,
    )
    return found, unlike


def key_of(record: LeafRecord) -> str:
    """Return what a leaf of both checkpoints is found by."""
    return f"{record.item}:{record.path}"


_Leaves = dict[tuple[str, str], tuple[LeafRecord, int]]


def _leaves(manifest: Manifest) -> _Leaves:
    """Return the leaves by item and path, with their numbers in the item."""
    names = list(manifest.items)
    found: _Leaves = {}
    counts = dict.fromkeys(names, 0)
    for record in leaf_records(manifest):
        item = names[0] if manifest.unnamed else record.item
        found[item, record.path] = record, counts[item]
        counts[item] += 1
    return found


def _pairs(
    manifests: tuple[Manifest, Manifest], first: _Leaves, second: _Leaves
) -> Iterator[PairedLeaf]:
    for (item, path), (record, number) in first.items():
        if (item, path) in second:
            other, other_number = second[item, path]
            numbers = number, other_number
            entries = (
                manifests[0].items[item].leaves[number],
                manifests[1].items[item].leaves[other_number],
            )
            yield PairedLeaf(item, (record, other), numbers, entries)


def _type_text(pair: PairedLeaf, side: int) -> str:
    record, entry = pair.records[side], pair.entries[side]
    return record.type_text if entry.impl is None else f"{record.type_text} of {entry.impl}"


def _value_text(pair: PairedLeaf, side: int) -> str:
    record, entry = pair.records[side], pair.entries[side]
    return str(entry.value) if record.value is None else record.value


def _chunks_changed(pair: PairedLeaf) -> int | None:
    """Return how many chunks have other digests; None if that cannot be said."""
    one, other = pair.entries
    if not pair.records[0].nbytes:
        return 0
    digests = one.digests, other.digests
    known = all(each not in ("", UNCHECKED) for side in digests for each in side)
    if not known or tuple(one.chunks) != tuple(other.chunks) or len(digests[0]) != len(digests[1]):
        return None
    return sum(a != b for a, b in zip(*digests, strict=True))


def _items(manifests: tuple[Manifest, Manifest], resized: set[str]) -> Iterator[ChangedText]:
    """Yield items that differ in more than their leaves."""
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
        if not has_tree and _kept(first, name, entries[0]) != _kept(second, name, entries[1]):
            yield ChangedText(shown, "", "these contents", "other contents")


def _kept(manifest: Manifest, name: str, item: ItemEntry) -> tuple[Any, dict[str, str]]:
    """Return what an item without leaves holds: its data, and the digests of its files."""
    start = f"{name}/"
    files = {
        path.removeprefix(start): each.digest
        for path, each in manifest.files.items()
        if path.startswith(start)
    }
    return item.data, files


def _metrics(manifest: Manifest) -> dict[str, str]:
    return {name: repr(value) for name, value in flat_metrics(manifest.metrics).items()}


def _metadata(manifest: Manifest) -> dict[str, str]:
    """Return the values of the metadata by the keys that lead to them, as JSON."""
    return dict(_values(manifest.metadata, "")) if manifest.metadata is not None else {}


def _values(value: Any, above: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            # So that no key looks like two.
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
