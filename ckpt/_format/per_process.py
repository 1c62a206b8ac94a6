"""Per-process items, of which every process of a job has its own: file names and entries. Pure.

Within a process such an item is like an item of a single process. Its files are kept beside those
of the other processes: `state.json` of process 1 of 4 as `process_1-of-4/state.json`. If a name
already contains a process, such as Grain's own, that part is replaced.

The primary combines the entries of all processes, and every process picks one of them when it
restores. A process that keeps a manifest on a private disk combines its entry with blank ones.
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
        processes: Number of processes that saved the item; 1 if this part is the whole item.
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


def owner_of(path: str) -> tuple[int, int] | None:
    """Return the number in a path of its process and of all processes; None if it has none."""
    found = _OWNER.search(path)
    return None if found is None else (int(found[2]), int(found[3]))


def renamed(path: str, process: int, processes: int) -> str:
    """Return a path with the process that it names, if any, replaced by another."""
    return _OWNER.sub(rf"\g<1>process_{process}-of-{processes}", path)


def combine(entries: Sequence[ItemEntry]) -> ItemEntry:
    """Return the combined entry of an item of which every process has saved its own.

    Args:
        entries: The entries that the handlers gave, in the order of processes.

    Raises:
        InvalidArgumentError: Handlers differ, or an entry has arrays, which would belong to all
            processes.
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
    """Return the entry of an item in the manifest of a process with a private disk.

    As in `combine`, with blank entries for the other processes.
    """
    if processes == 1:
        return entry
    blank = ItemEntry(handler=entry.handler)
    return combine([entry if number == process else blank for number in range(processes)])


def is_combined(entry: ItemEntry) -> bool:
    """Return True if an entry is the combined entry of an item that every process has for itself.

    Raises:
        CorruptCheckpointError: The entry looks like a combined one, and is not.
    """
    return _parts_of(entry) is not None


def pick(manifest: Manifest, item: str, process: int, processes: int) -> ProcessPart:
    """Return the part of an item that is for one process of a job.

    If the same number of processes saved the item, this is the process's own part. Otherwise any
    part serves if all are equal.

    Args:
        manifest: The step's manifest.
        item: Name of the item, combined or not.
        process: Number of the process that restores.
        processes: Number of processes that restore.

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
    """Return the manifest data of every process's handler; None if not combined."""
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
        owner = None if name == path else owner_of(name)
        if owner is not None and owner[1] == processes > owner[0]:
            owned[owner[0]][renamed(name, 0, 1)] = file
    return owned
