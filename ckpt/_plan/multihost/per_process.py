"""Per-process items, of which every process of a job has its own: file names and entries. Pure.

Within a process such an item is like one that a single process saves. Its files are kept beside
those of the others: `state.json` of process 1 of 4 as `process_1-of-4/state.json`. In a name that
already has a process, such as Grain's own, that is replaced.

The primary combines the entries of all processes, and every process picks one of them when it
restores. A process that keeps a manifest on a disk of its own combines its entry with blank ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

from ckpt._format.manifest import ItemEntry, JsonValue, Manifest
from ckpt._format.manifest_head import FileEntry
from ckpt.errors import CorruptCheckpointError, InvalidArgumentError, TargetMismatchError

_OWNER = re.compile(r"(^|/)process_([0-9]{1,9})-of-([0-9]{1,9})(?=[./]|$)")
_COUNT, _PARTS = "process_count", "processes"


class ProcessPart(Struct, frozen=True):
    """The part of an item that one process saved.

    Attributes:
        entry: Its entry, as the handler of that process gave it.
        process: Number of that process.
        processes: How many saved the item; 1 if this part is the whole item.
    """

    entry: ItemEntry
    process: int = 0
    processes: int = 1


def own_path(path: str, process: int, processes: int) -> str:
    """Return the path of a file of one of several processes, relative to the item."""
    if processes == 1:
        return path
    if _OWNER.search(path):
        return renamed(path, process, processes)
    return f"process_{process}-of-{processes}/{path}"


def renamed(path: str, process: int, processes: int) -> str:
    """Return a path with another process in place of the one that it names, if it does."""
    return _OWNER.sub(rf"\g<1>process_{process}-of-{processes}", path)


def combine(entries: Sequence[ItemEntry]) -> ItemEntry:
    """Return the entry of an item of which every process has saved its own.

    Args:
        entries: What the handler of every process gave, in the order of processes.

    Raises:
        InvalidArgumentError: They are of different handlers, or one of them has arrays, which
            would be those of all processes.
    """
    if len(entries) == 1:
        return entries[0]
    first = entries[0].handler
    for process, entry in enumerate(entries):
        if entry.handler != first:
            raise InvalidArgumentError(
                f"process 0 saved it with the handler {first!r:.80}, and process {process} with "
                f"{entry.handler!r:.80}: all processes must save an object of the same kind"
            )
        if entry.nodes or entry.leaves:
            raise InvalidArgumentError(
                f"the handler {first!r:.80} has staged arrays of process {process} alone: a "
                "handler with per_process=True keeps what it stores in files"
            )
    return ItemEntry(
        handler=first,
        nbytes=sum(entry.nbytes for entry in entries),
        data={_COUNT: len(entries), _PARTS: [entry.data for entry in entries]},
    )


def apart(entry: ItemEntry, process: int, processes: int) -> ItemEntry:
    """Return the entry of an item in the manifest of a process that keeps its own.

    As `combine`, with blank entries of the other processes.
    """
    if processes == 1:
        return entry
    blank = ItemEntry(handler=entry.handler)
    return combine([entry if number == process else blank for number in range(processes)])


def is_combined(entry: ItemEntry) -> bool:
    """Tell whether an entry is of an item of which every process has its own.

    Raises:
        CorruptCheckpointError: The entry looks like a combined one, and is not.
    """
    return _parts_of(entry) is not None


def pick(manifest: Manifest, item: str, process: int, processes: int) -> ProcessPart:
    """Return the part of an item that is for one process of a job.

    It is the process's own if the same number of processes saved the item. Otherwise it can be any
    part if all are equal.

    Args:
        manifest: The step's manifest.
        item: Name of the item, combined or not.
        process: Number of the process that restores.
        processes: How many restore.

    Raises:
        TargetMismatchError: Another number of processes saved it, each with a state of its own.
        CorruptCheckpointError: The entry looks like a combined one, and is not.
    """
    entry = manifest.items[item]
    parts = _parts_of(entry)
    if parts is None:
        return ProcessPart(entry)
    saved = len(parts)
    owned = _files_by_process(manifest.files, f"{item}/", saved)
    own = process
    if saved != processes:
        own = 0
        states = list(zip(parts, owned, strict=True))
        different = next((n for n, state in enumerate(states) if state != states[0]), None)
        if different is not None:
            raise TargetMismatchError(
                f"it was saved by {saved} processes, each with a state of its own (those of "
                f"processes 0 and {different} differ), and is restored by {processes}: a state "
                f"cannot be divided again. Restore with {saved} processes, or leave the item out "
                "(items=)"
            )
    nbytes = sum(file.size for file in owned[own].values())
    return ProcessPart(ItemEntry(handler=entry.handler, nbytes=nbytes, data=parts[own]), own, saved)


def _parts_of(entry: ItemEntry) -> list[JsonValue] | None:
    """Return what the handler of every process keeps in the manifest; None if not combined."""
    data = entry.data
    if not isinstance(data, dict) or set(data) != {_COUNT, _PARTS}:
        return None
    parts, count = data[_PARTS], data[_COUNT]
    if not isinstance(parts, list) or len(parts) != count or len(parts) < 2:
        raise CorruptCheckpointError(
            "its entry in the manifest does not have a part for every process"
        )
    return parts


def _files_by_process(
    files: Mapping[str, FileEntry], folder: str, processes: int
) -> list[dict[str, FileEntry]]:
    """Return the files of every process below `folder`, by names that are the same for all."""
    owned: list[dict[str, FileEntry]] = [{} for _ in range(processes)]
    for path, file in files.items():
        name = path.removeprefix(folder)
        owner = None if name == path else _OWNER.search(name)
        if owner is not None and int(owner[3]) == processes > int(owner[2]):
            owned[int(owner[2])][renamed(name, 0, 1)] = file
    return owned
