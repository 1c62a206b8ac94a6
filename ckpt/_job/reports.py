"""Save reports: sent by each process to the one that writes the manifest of the step."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct, field

from ckpt._format.manifest import ItemEntry, decode_item, encode_item
from ckpt._format.manifest_head import FileEntry
from ckpt._job.process_reports import ProcessReport, disagreement
from ckpt.errors import CoordinationError, located


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
