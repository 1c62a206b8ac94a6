"""Process reports: encodes for the primary the chunks that a process has written of an item. Pure.

Every process reports its chunks and their places, with fingerprints of its tree and of the values
that must be the same on all processes, by which the primary finds differences. A fingerprint has
one line for every leaf; that of a tree has a last line for its inner nodes. Equal fingerprints have
equal signatures, and if two differ, the first different line is reported. If the lines of all
processes would be too many for the primary, fingerprints hold digests of blocks of lines instead,
and the block is reported.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import msgspec
import numpy as np
from msgspec import Struct, field

from ckpt._format.leaf_table import DIGEST_BYTES
from ckpt._format.manifest import ItemEntry, Node, decode_item, encode_item
from ckpt._format.manifest_head import FileEntry, digest
from ckpt._format.places import describe_sharding
from ckpt._plan.item_reports import ROW, ChunkNotes, ItemReport
from ckpt._plan.save_plan import SavePlan
from ckpt._tree.leaf_kinds import ARRAY_KINDS, CALLABLE, SCALAR_KINDS, encode_scalar
from ckpt._tree.leaf_specs import LeafSpec
from ckpt._tree.table import sharding_text
from ckpt.errors import CheckpointError, CoordinationError, CorruptCheckpointError, located

Array = np.ndarray[Any, Any]
# Most bytes of all processes' fingerprints; larger ones are reduced to digests.
_MOST_BYTES = 64 << 20
_LINE_BYTES = 24
_LONGEST_VALUE = 80
# Stands for the inner nodes in the place of a leaf's name.
_STRUCTURE = ""

# The name of a leaf, and its description.
Line = tuple[str, str]


class TreeFingerprint(Struct, frozen=True):
    """Lines about a tree in few bytes.

    Attributes:
        signature: Digest of all lines, 16 bytes.
        block: Number of lines per digest in `packed`; 0 if `packed` holds the lines.
        packed: The lines or digests.
    """

    signature: bytes
    block: int
    packed: bytes


def line_fingerprint(lines: Sequence[Line], processes: int) -> TreeFingerprint:
    """Return the fingerprint of lines; `processes` fingerprints are compared."""
    text = json.dumps(lines).encode()
    room = _MOST_BYTES // processes
    block = 0
    if len(text) > room:
        block = -(-len(lines) // max(room // _LINE_BYTES, 1))
        lines = [
            ("", digest(json.dumps(lines[start : start + block]).encode())[:16])
            for start in range(0, len(lines), block)
        ]
    packed = zlib.compress(json.dumps(lines).encode(), 1)
    return TreeFingerprint(bytes.fromhex(digest(text)), block, packed)


def tree_fingerprint(plan: SavePlan, nodes: Sequence[Node]) -> TreeFingerprint:
    """Return the fingerprint of a tree's structure and leaves, without their values."""
    assert plan.group is not None
    known: dict[int, str] = {}
    shape = digest(b"".join(map(msgspec.json.encode, nodes)))
    index = plan.group.index
    lines = [(leaf.name, _described(leaf.spec, index, known)) for leaf in plan.leaves]
    # The last line, since trees with different leaves have different nodes, too, and the leaves are
    # the more helpful difference.
    lines.append((_STRUCTURE, f"{len(nodes)} inner nodes #{shape[:8]}"))
    return line_fingerprint(lines, plan.group.count)


def _described(spec: LeafSpec, process: int, known: dict[int, str]) -> str:
    if spec.dtype is None or spec.kind in SCALAR_KINDS:
        return spec.kind
    words = [spec.kind, f"{spec.dtype}{list(spec.shape)}"]
    if spec.sharding is not None:
        words.append(_sharding(spec.sharding, process, known))
    more = {
        "impl": spec.impl,
        "the same as leaf": spec.same_as,
        "cast from": spec.cast_from,
        "stored as": spec.format,
    }
    words.extend(f"{name} {value}" for name, value in more.items() if value is not None)
    words.extend(["weakly typed"] * spec.weak_type + ["uncommitted"] * (not spec.committed))
    return ", ".join(words)


def _sharding(sharding: jax.sharding.Sharding, process: int, known: dict[int, str]) -> str:
    found = known.get(id(sharding))
    if found is None:
        devices: set[jax.Device] = sharding.device_set
        if all(device.process_index == process for device in devices):
            # These devices differ between processes.
            found = "on its own devices"
        else:
            entry = describe_sharding(sharding)
            marks = digest(msgspec.json.encode(entry))[:8]
            found = f"{sharding_text(entry)} #{marks}"
        known[id(sharding)] = found
    return found


def value_fingerprint(
    plan: SavePlan, leaves: Sequence[Any], digests: Mapping[int, str]
) -> TreeFingerprint:
    """Return the fingerprint of the values of the leaves that every process has for itself.

    Args:
        plan: The plan.
        leaves: Python scalars and functions at their places; places of arrays are ignored.
        digests: Digest of the bytes of every array among `plan.own`, by number of the leaf.
    """
    assert plan.group is not None
    lines = []
    for number in plan.own:
        leaf = plan.leaves[number]
        kind = leaf.spec.kind
        if kind in ARRAY_KINDS:
            text = f"an array #{digests[number]}"
        elif kind == CALLABLE:
            text = "a function"
        else:
            text = f"{kind} {encode_scalar(kind, leaves[number])}"
            if len(text) > _LONGEST_VALUE:
                text = f"{text[: _LONGEST_VALUE - 35]}... #{digest(text.encode())[:32]}"
        lines.append((leaf.name, text))
    return line_fingerprint(lines, plan.group.count)


def first_difference(one: TreeFingerprint, other: TreeFingerprint) -> tuple[str, str, str]:
    """Return the first leaf in which two different fingerprints differ, and each description of it.

    Raises:
        CheckpointError: A fingerprint is malformed.
    """
    mine, theirs = _lines(one), _lines(other)
    place = next(
        (n for n, pair in enumerate(zip(mine, theirs, strict=False)) if len(set(pair)) > 1), None
    )
    if place is None:
        place = min(len(mine), len(theirs))
    if one.block or other.block or place == len(mine) == len(theirs):
        start = place * max(one.block, other.block)
        what = f"one of the leaves from number {start} on, or what holds them,"
        return what, "something", "something else"
    found = [lines[place] for lines in (mine, theirs) if place < len(lines)]
    names = [name for name, _ in found]
    if len(names) == 2 and names[0] == names[1]:
        what = "its structure" if names[0] == _STRUCTURE else f"leaf {names[0]!r:.400}"
        return what, found[0][1], found[1][1]
    # A leaf that only one has shifts all leaves after it.
    both = dict(mine), dict(theirs)
    lone = next((name for name in names if not all(name in lines for lines in both)), None)
    if lone is None:
        return f"leaf number {place}", f"{names[0]!r:.200}", f"{names[-1]!r:.200}"
    return f"leaf {lone!r:.400}", both[0].get(lone, "missing"), both[1].get(lone, "missing")


def _lines(fingerprint: TreeFingerprint) -> list[Line]:
    try:
        data = zlib.decompressobj().decompress(fingerprint.packed, _MOST_BYTES)
        lines = [(name, text) for name, text in json.loads(data)]
    except (zlib.error, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"the fingerprint of a tree cannot be read: {error!s:.100}"
        ) from error
    if not all(isinstance(text, str) for line in lines for text in line):
        raise CheckpointError("the fingerprint of a tree holds something other than text")
    return lines


_MAGIC = b"ckr3"
# Numbers of files, chunks, bytes of the packed rows, both kinds of notes; for both fingerprints the
# block and the number of bytes.
_HEAD = struct.Struct("<4sQQQQQQQQQ")
# Bytes of the records of the extension whose notes a report has room for.
_RECORD_BYTES, _OTHER_BYTES = 32, 20
_DATA_FILE = re.compile(r"d/([0-9a-f]{32})")


class ProcessReport(Struct, frozen=True):
    """The report of one process on an item.

    Attributes:
        written: The chunks that it has written.
        tree: Fingerprint of the tree; the same on all processes.
        values: Fingerprint of the values that every process has for itself; the same on all
            processes.
    """

    written: ItemReport
    tree: TreeFingerprint
    values: TreeFingerprint

    def pack(self) -> bytes:
        """Return the bytes of the report."""
        written, tree, values = self.written, self.tree, self.values
        rows = zlib.compress(b"".join(written.rows[name].tobytes() for name in ROW.names or ()), 1)
        counts: tuple[int, ...] = (len(written.files), len(written.rows), len(rows))
        notes = next(iter(written.notes.values()), None)
        counts += (0, 0) if notes is None else (len(notes.records), len(notes.others))
        blocks = (tree.block, len(tree.packed), values.block, len(values.packed))
        matches = [_DATA_FILE.fullmatch(path) for path in written.files]
        names = b"".join(bytes.fromhex(match[1]) for match in matches if match is not None)
        assert len(names) == len(matches) * DIGEST_BYTES, "data files are d/<32 hex digits>"
        body = b"".join(
            (
                _HEAD.pack(_MAGIC, *counts, *blocks),
                tree.signature,
                values.signature,
                names,
                rows,
                written.digests.tobytes(),
                b"" if notes is None else notes.records.tobytes() + notes.others.tobytes(),
                tree.packed,
                values.packed,
            )
        )
        return body + bytes.fromhex(digest(body))

    @staticmethod
    def unpack(data: bytes) -> ProcessReport:
        """Return the report whose bytes are `data`; the inverse of `pack`.

        Raises:
            CorruptCheckpointError: The bytes are not a report, or not a whole one.
        """
        body, checksum = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
        if len(body) < _HEAD.size or bytes.fromhex(digest(body)) != checksum:
            raise _malformed(data, "it is cut short, or was changed on its way")
        magic, files, chunks, packed, noted, others, *blocks = _HEAD.unpack_from(body)
        tree_block, tree_bytes, value_block, value_bytes = blocks
        lengths = [DIGEST_BYTES, DIGEST_BYTES, files * DIGEST_BYTES, packed]
        lengths += [chunks * DIGEST_BYTES, noted * _RECORD_BYTES, others * _OTHER_BYTES]
        lengths += [tree_bytes, value_bytes]
        if noted not in (0, chunks):
            raise _malformed(data, f"it has notes on {noted} of {chunks} chunks")
        if magic != _MAGIC or _HEAD.size + sum(lengths) != len(body):
            raise _malformed(data, "its parts do not have the lengths that they should have")
        parts = []
        end = _HEAD.size
        for length in lengths:
            parts.append(body[end : end + length])
            end += length
        names = parts[2].hex()
        written = ItemReport(
            tuple(f"d/{names[start : start + 32]}" for start in range(0, len(names), 32)),
            _rows(parts[3], chunks, data),
            np.frombuffer(parts[4], np.uint8).reshape(chunks, DIGEST_BYTES),
            _notes(chunks, parts[5], parts[6]) if noted or others else {},
        )
        return ProcessReport(
            written,
            TreeFingerprint(parts[0], tree_block, parts[7]),
            TreeFingerprint(parts[1], value_block, parts[8]),
        )


def _notes(chunks: int, records: bytes, others: bytes) -> dict[str, ChunkNotes]:
    # Imported here: a job without extensions does without it.
    from ckpt.extensions import reported_notes

    return reported_notes(chunks, records, others)


def _rows(packed: bytes, chunks: int, data: bytes) -> Array:
    inflater = zlib.decompressobj()
    try:
        raw = inflater.decompress(packed, max(chunks * ROW.itemsize, 1))
    except zlib.error as error:
        raise _malformed(data, f"its rows cannot be read: {error}") from error
    if len(raw) != chunks * ROW.itemsize or not inflater.eof or inflater.unused_data:
        raise _malformed(data, f"its rows are not those of {chunks} chunks")
    rows = np.empty(chunks, ROW)
    start = 0
    for name in ROW.names or ():
        column = np.frombuffer(raw, ROW[name], chunks, start)
        rows[name] = column
        start += column.nbytes
    return rows


def _malformed(data: bytes, reason: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"the report of a process on its save, {len(data)} bytes, cannot be used: {reason}"
    )


def disagreement(reports: Sequence[ProcessReport]) -> str | None:
    """Return the difference between the trees of processes; None if they are the same.

    Args:
        reports: The reports of all processes, in their order.

    Raises:
        CheckpointError: A fingerprint cannot be read.
    """
    first = reports[0]
    for process, report in enumerate(reports):
        if report.tree.signature != first.tree.signature:
            what, here, there = first_difference(first.tree, report.tree)
            return (
                f"the processes save different trees: {what} is {here} on process 0, and {there} "
                f"on process {process}. All processes must save a tree of the same structure, with "
                "the same shapes, dtypes, shardings and formats"
            )
    for process, report in enumerate(reports):
        if report.values.signature != first.values.signature:
            what, here, there = first_difference(first.values, report.values)
            return (
                f"{what} has one value for all processes, but it is {here} on process 0, and "
                f"{there} on process {process}. Make it equal on all of them, make it an array "
                "over devices of all processes, or save it as an item that each has of its own"
            )
    return None


class SaveReport(Struct):
    """The report of one process on what it has written of a step.

    Attributes:
        entries: Entries that the handlers made of its items, by name.
        trees: Report on the chunks of each item that is a tree, by name.
        files: Size and digest of every file that it has written.
    """

    entries: dict[str, ItemEntry] = field(default_factory=dict)
    trees: dict[str, ProcessReport] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)


def encode_report(report: SaveReport) -> bytes:
    trees = {name: tree.pack() for name, tree in report.trees.items()}
    head = {
        "entries": {name: encode_item(each).decode() for name, each in report.entries.items()},
        "files": {
            path: [each.size, each.digest, each.shared] for path, each in report.files.items()
        },
        "trees": {name: len(data) for name, data in trees.items()},
    }
    text = json.dumps(head).encode()
    return b"".join((len(text).to_bytes(8, "little"), text, *trees.values()))


def decode_report(data: bytes) -> SaveReport:
    """Return the report whose bytes are `data`; the inverse of `encode_report`.

    Raises:
        CoordinationError: The bytes are not a report of this version.
        CorruptCheckpointError: The report on a tree in it is not whole.
    """
    start = 8 + int.from_bytes(data[:8], "little")
    try:
        head = json.loads(data[8:start])
        entries = {name: decode_item(each) for name, each in head["entries"].items()}
        files = {
            path: FileEntry(size, digest, shared)
            for path, (size, digest, shared) in head["files"].items()
        }
        lengths = {name: int(length) for name, length in head["trees"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CoordinationError(
            f"what a process tells of its save is not understood ({data[8:88]!r}); all processes of"
            " a job have to run the same version of this library"
        ) from error
    trees = {}
    for name, length in lengths.items():
        trees[name] = ProcessReport.unpack(data[start : start + length])
        start += length
    return SaveReport(entries, trees, files)


def same_items(reports: Sequence[SaveReport]) -> None:
    """Raise an error unless all processes have saved the same items.

    Raises:
        CoordinationError: The items differ; the error lists those of two processes.
    """
    first = _handlers(reports[0])
    for index, report in enumerate(reports):
        if _handlers(report) != first:
            raise CoordinationError(
                f"process 0 saved the items {_list_handlers(first)}, and process {index} "
                f"{_list_handlers(_handlers(report))}: all processes must save the same items"
            )


def check_alike(names: Collection[str], reports: Sequence[SaveReport]) -> None:
    """Raise an error unless the processes have saved the same trees.

    Raises:
        CoordinationError: The trees differ; names the first leaf.
    """
    for name in names:
        with located(item=name):
            difference = disagreement([report.trees[name] for report in reports])
            if difference is not None:
                raise CoordinationError(difference)


def _handlers(report: SaveReport) -> Mapping[str, str]:
    """Return the handler of each item, with a mark for trees."""
    return {
        name: entry.handler + ", a tree" * (name in report.trees)
        for name, entry in report.entries.items()
    }


def _list_handlers(handlers: Mapping[str, str]) -> str:
    return ", ".join(f"{name!r} ({handler:.60})" for name, handler in handlers.items()) or "none"
