"""Checkpoints as records: a summary, and the leaves, from the manifest alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ckpt._format.array_format import DTYPES
from ckpt._format.leaf_table import DIGEST_BYTES, LeafForm, LeafTable
from ckpt._format.manifest import ItemEntry, Manifest
from ckpt._format.manifest_head import OWN_FORMAT, VIRTUAL, digest, flat_metrics
from ckpt._inspection.json_values import finite, time_of
from ckpt._inspection.locations import Checkpoint
from ckpt._inspection.values.leaf_index import split_index
from ckpt._proof.run_notes import CONTRACT_NOTE
from ckpt._tree.boxes import unboxed_names
from ckpt._tree.leaf_kinds import ARRAY_KINDS
from ckpt._tree.leaf_names import compile_pattern, leaf_of_item, split_leaf, suggestion
from ckpt._tree.table import sharding_text
from ckpt._vitals.stored_signs import nonfinite_leaves, notes_of_step
from ckpt.errors import CorruptCheckpointError, InvalidArgumentError

_MOST_CHARACTERS = 60


class LeafRecord(Struct, frozen=True):
    """One leaf of a checkpoint.

    Attributes:
        item: The item of the leaf; empty if the checkpoint is one unnamed object.
        path: Its leaf path, as messages write it.
        kind: `jax`, `key`, `numpy` or `numpy_scalar` for arrays; else the kind of the value: `int`,
            `float`, `complex`, `bool`, `str`, `bytes`, `numpy_str`, `numpy_bytes` or `callable`.
        dtype: Dtype of an array; for a PRNG key, the dtype of its data.
        shape: Global shape of an array.
        chunks: Shape of one stored chunk.
        nbytes: Logical bytes of an array.
        stored_bytes: Bytes that it takes in the store; 0 if it is stored as another leaf.
        codec: Compression of its chunks, or None.
        sharding: Its layout on the devices when it was saved, in a few words.
        same_as: Leaf path of the array that is the same object, or None.
        value: A Python value as text; None for arrays and functions.
        content: A digest of a value, or of an array; None if it is unknown. Two arrays with the
            same shape, dtype and chunks are equal if and only if their known digests are.
    """

    item: str
    path: str
    kind: str
    dtype: str | None = None
    shape: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()
    nbytes: int = 0
    stored_bytes: int = 0
    codec: str | None = None
    sharding: str = ""
    same_as: str | None = None
    value: str | None = None
    content: str | None = None

    @property
    def name(self) -> str:
        """The leaf as people write it: `model:params.w`."""
        return leaf_of_item(self.item, self.path)

    @property
    def is_array(self) -> bool:
        """True if the leaf is an array."""
        return self.kind in ARRAY_KINDS

    @property
    def type_text(self) -> str:
        """Dtype and shape, or the kind of the value."""
        if not self.is_array:
            return self.kind
        host = "" if self.kind == "jax" else f" ({self.kind})"
        return f"{self.dtype}{list(self.shape)}{host}"


def leaf_records(manifest: Manifest) -> Iterator[LeafRecord]:
    """Yield the leaves of all items, in the order of their trees.

    Raises:
        CorruptCheckpointError: The manifest contradicts itself.
    """
    for name, item in manifest.items.items():
        yield from records_of(manifest, name, range(len(item.leaves)))


def records_of(manifest: Manifest, name: str, numbers: Iterable[int]) -> Iterator[LeafRecord]:
    """Yield some leaves of one item, by their numbers there.

    Raises:
        CorruptCheckpointError: The manifest contradicts itself.
    """
    item = manifest.items[name]
    paths = unboxed_names(item.nodes, item.leaves.names)
    for number in numbers:
        yield _leaf("" if manifest.unnamed else name, item, paths, number)


def _leaf(item_name: str, item: ItemEntry, paths: Sequence[str], number: int) -> LeafRecord:
    table = item.leaves
    form = table.forms[int(table.form[number])]
    path = paths[number]
    if form.kind not in ARRAY_KINDS:
        return LeafRecord(
            item_name,
            path,
            form.kind,
            value=_value(table, number, form.kind),
            # Of the whole value: the record shows only its beginning.
            content=digest(repr(table.values.get(number)).encode(errors="surrogatepass")),
        )
    nbytes = _logical_bytes(form, path)
    source = table.same_as.get(number)
    places = item.shardings
    if form.sharding is not None and form.sharding >= len(places):
        raise CorruptCheckpointError(f"there is no sharding {form.sharding}", leaf=path)
    return LeafRecord(
        item_name,
        path,
        form.kind,
        form.dtype,
        form.shape[:-1] if form.kind == "key" else form.shape,
        form.chunks,
        nbytes,
        0 if source is not None else _stored_bytes(table, number, nbytes),
        form.codec,
        "" if form.sharding is None else sharding_text(places[form.sharding]),
        None if source is None else paths[source],
        content=_content(table, number if source is None else source),
    )


def _logical_bytes(form: LeafForm, path: str) -> int:
    dtype = DTYPES.get(form.dtype or "")
    if dtype is None:
        raise CorruptCheckpointError(f"there is no dtype {form.dtype!r:.60}", leaf=path)
    return math.prod(form.shape) * int(dtype.itemsize)


def _stored_bytes(table: LeafTable, number: int, nbytes: int) -> int:
    first, last = int(table.firsts[number]), int(table.firsts[number + 1])
    if not len(table.lengths):
        return nbytes
    # A chunk that was not compressed has the length 0.
    lengths = table.lengths[first:last]
    return int(lengths.sum()) if lengths.all() else nbytes


def _content(table: LeafTable, number: int) -> str | None:
    first, last = int(table.firsts[number]), int(table.firsts[number + 1])
    digests = table.digests[first * DIGEST_BYTES : last * DIGEST_BYTES]
    pieces = (digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES))
    # Zeros stand for an unknown digest.
    return digest(digests) if all(any(piece) for piece in pieces) else None


def _value(table: LeafTable, number: int, kind: str) -> str | None:
    value = table.values.get(number)
    if kind == "callable":
        return None
    text = repr(value) if kind in ("str", "numpy_str", "bool") else str(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


class ChosenLeaf(Struct, frozen=True):
    """A leaf of a checkpoint that a text stands for.

    Attributes:
        item: Name in the manifest of the item that the leaf is in.
        number: Number of the leaf in the item.
        record: The leaf.
        index: The part of it in brackets, or None.
    """

    item: str
    number: int
    record: LeafRecord
    index: str | None = None


def chosen_leaves(checkpoint: Checkpoint, text: str) -> list[ChosenLeaf]:
    """Return the leaves that a text stands for, in the order of their trees.

    The text is a leaf path, with or without an index in brackets, or a pattern of leaf paths. The
    name of an item and a colon may come first.

    Raises:
        InvalidArgumentError: There is no such leaf.
    """
    manifest = checkpoint.opened.manifest
    leaves = [
        ChosenLeaf(name, number, record)
        for name, item in manifest.items.items()
        for number, record in enumerate(records_of(manifest, name, range(len(item.leaves))))
    ]
    items = () if manifest.unnamed else manifest.items
    path, index = split_index(text)
    # A key may have brackets, so the whole text is tried as a path first.
    for wanted, part in ((text, None), (path, index)):
        owner, name = split_leaf(wanted, items)
        mine = [each for each in leaves if owner in (None, each.item)]
        found = [replace(each, index=part) for each in mine if each.record.path == name]
        if found:
            return found
    owner, name = split_leaf(text, items)
    mine = [each for each in leaves if owner in (None, each.item)]
    found = [each for each in mine if compile_pattern(name or "**").covers(each.record.path)]
    if found and text:
        return found
    hint = suggestion(split_leaf(path, items)[1], dict.fromkeys(each.record.path for each in mine))
    raise InvalidArgumentError(f"{checkpoint.location} has no leaf {path!r:.200}{hint}")


class ItemSummary(Struct, frozen=True):
    """An item of a checkpoint.

    Attributes:
        name: Name of the item.
        handler: The handler that wrote it.
        leaves: Number of its leaves.
        arrays: Number of the leaves that are arrays.
        nbytes: Logical bytes of its arrays, or bytes of the files of its handler.
    """

    name: str
    handler: str
    leaves: int
    arrays: int
    nbytes: int


class DroppedSummary(Struct, frozen=True):
    """An item that was taken out of a checkpoint.

    Attributes:
        name: Name of the item.
        dropped: Time at which it was taken out (UTC).
        policy: The policy that did not keep it; None if it was deleted by hand.
        stored_bytes: Bytes of its files.
    """

    name: str
    dropped: datetime
    policy: str | None
    stored_bytes: int


class CheckpointSummary(Struct, frozen=True):
    """A summary of a checkpoint.

    Attributes:
        path: Path of the checkpoint.
        step: Its number; None for a one-shot checkpoint.
        writer: Versions of the libraries that wrote it.
        format: `ckpt` or the name of the format of another library.
        created: Time at which its save began (UTC), if known.
        committed: Time of its commit (UTC), if known.
        unnamed: True if it is one object that was saved without a name.
        items: Its items.
        nbytes: Logical bytes of all items.
        stored_bytes: Bytes of its files, including the manifest; None if another library wrote it.
        files: Number of its files; None if another library wrote it.
        shared_bytes: Bytes of the files that its save took over from the step before.
        process_count: Number of processes that wrote it.
        is_virtual: True if it has data files that lie elsewhere.
        sources: Locations of those files.
        metrics: Metrics by name; None for values that are not finite.
        metadata: User metadata.
        contract: The contract of its run, or None.
        parent: Path of the checkpoint that the run began from, or None.
        statistics: Seconds that the save spent, by activity.
        nonfinite: Number of values that are NaN or infinite, by leaf path, for leaves that have
            any; None if the vital signs of an array are unknown.
        unequal: Leaves whose replicas were not equal.
        dropped: Items that were taken out of it after the save.
        leaves: The chosen leaves.
    """

    path: str
    step: int | None
    writer: dict[str, str]
    format: str
    created: datetime | None
    committed: datetime | None
    unnamed: bool
    items: list[ItemSummary]
    nbytes: int
    stored_bytes: int | None
    files: int | None
    shared_bytes: int
    process_count: int
    is_virtual: bool
    sources: list[str]
    metrics: dict[str, float | None]
    metadata: Any
    contract: Any
    parent: str | None
    statistics: dict[str, float]
    nonfinite: dict[str, int] | None
    unequal: list[str]
    dropped: list[DroppedSummary]
    leaves: list[LeafRecord]


def summarize(
    checkpoint: Checkpoint, leaves: Sequence[LeafRecord] | None = None
) -> CheckpointSummary:
    """Return the summary of a checkpoint with the chosen leaves; by default, all of them.

    Raises:
        CorruptCheckpointError: The manifest contradicts itself.
    """
    manifest = checkpoint.opened.manifest
    # If another library wrote the checkpoint, not all of its files are known.
    is_own = manifest.format == OWN_FORMAT
    notes = notes_of_step(manifest)
    items = [
        ItemSummary(
            name,
            item.handler,
            len(item.leaves),
            sum(item.leaves.forms[int(form)].kind in ARRAY_KINDS for form in item.leaves.form),
            item.nbytes,
        )
        for name, item in manifest.items.items()
    ]
    return CheckpointSummary(
        path=checkpoint.location,
        step=manifest.step,
        writer=dict(manifest.writer),
        format=manifest.format,
        created=time_of(manifest.created_ns),
        committed=time_of(manifest.committed_ns),
        unnamed=manifest.unnamed,
        items=items,
        nbytes=sum(each.nbytes for each in items),
        stored_bytes=checkpoint.opened.stored_bytes,
        files=len(manifest.files) + 1 if is_own else None,
        shared_bytes=sum(each.size for each in manifest.files.values() if each.shared),
        process_count=manifest.process_count,
        is_virtual=VIRTUAL in manifest.requires,
        sources=sorted(each.location for each in manifest.sources.values()),
        metrics=finite(flat_metrics(manifest.metrics)),
        metadata=manifest.metadata,
        contract=manifest.extensions.get(CONTRACT_NOTE),
        parent=None if manifest.parent is None else manifest.parent.path,
        statistics=dict(manifest.statistics),
        nonfinite=None if notes.nonfinite_leaves is None else nonfinite_leaves(manifest),
        unequal=list(notes.unequal),
        dropped=[
            DroppedSummary(each.item, each.dropped, each.policy, each.nbytes)
            for each in manifest.dropped
        ],
        leaves=list(leaf_records(manifest) if leaves is None else leaves),
    )
