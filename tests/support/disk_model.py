"""What file operations did to a disk, and which of it a power cut may still take away.

The model promises what POSIX does and no more: the content of a file is durable once an fsync of
that file has ended which began after the write; a name is once the same is true of its directory,
and, of a new one, of what bears it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.support.faults import SYNCS, WRITES, FileOperation

__all__ = ["NEVER", "DataEffect", "DiskModel", "Effect", "NameEffect", "Tree"]

# Relative path to content; None for a directory.
Tree = Mapping[str, bytes | None]
NEVER = sys.maxsize

_TOP = 0
_EXCHANGE = 2
_DELETED = " (deleted)"
# Changes that the model knows nothing of; times and rights of files do not matter to it.
_UNKNOWN = {"symlink", "truncate"}


@dataclass(frozen=True, slots=True)
class NameEffect:
    """Names of directories that changed in one act.

    Attributes:
        time: When that was.
        what: The operation, for people.
        changes: Directory, name, and what bears the name from then on, or None.
        needs: What has to be synced for it to be durable.
    """

    time: int
    what: str
    changes: tuple[tuple[int, str, int | None], ...]
    needs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DataEffect:
    """Bytes of a file that changed.

    Attributes:
        time: When that was.
        what: The operation, for people.
        file: The file.
        offset: Where they begin.
        data: What was written, or None where only the length was set.
        length: The least length of the file from then on; with `exact` also the greatest.
        exact: Whether the file was cut to that length.
    """

    time: int
    what: str
    file: int
    offset: int
    data: bytes | None
    length: int
    exact: bool = False

    @property
    def needs(self) -> tuple[int, ...]:
        """What has to be synced for it to be durable."""
        return (self.file,)


Effect = NameEffect | DataEffect


@dataclass(slots=True)
class DiskModel:
    """A disk below one directory: what it held at first, and what happened to it.

    Files and directories are numbers; 0 is the directory.

    Attributes:
        effects: What was changed, in order of time.
        directories: What the directories held at first, by number.
        files: What the files held at first, by number.
        syncs: Beginning and end of every fsync, by the number of what was synced.
        names: What the directories hold now.
    """

    effects: list[Effect] = field(default_factory=list)
    directories: dict[int, dict[str, int]] = field(default_factory=lambda: {_TOP: {}})
    files: dict[int, bytes] = field(default_factory=dict)
    syncs: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    names: dict[int, dict[str, int]] = field(default_factory=lambda: {_TOP: {}})
    _next: int = 1

    @staticmethod
    def of(before: Tree, operations: Iterable[FileOperation]) -> DiskModel:
        """Return the model of a directory that held `before`, after some operations."""
        model = DiskModel()
        for path in sorted(before):
            model._put_first(path, before[path])
        model.names = {number: dict(names) for number, names in model.directories.items()}
        done = [each for each in operations if each.error is None and each.ended is not None]
        for operation in sorted(done, key=_time_of):
            model._apply(operation)
        return model

    def durable_at(self, effect: Effect) -> int:
        """Return from when on no power cut can take an effect away; `NEVER` if there is none."""
        return max(self._synced_after(number, effect.time) for number in effect.needs)

    def path_of(self, number: int) -> str | None:
        """Return the path that a file or directory has now; None if it has none."""
        waiting = [(".", _TOP)]
        while waiting:
            path, each = waiting.pop()
            if each == number:
                return path
            for name, child in self.names.get(each, {}).items():
                waiting.append((os.path.normpath(os.path.join(path, name)), child))
        return None

    def _synced_after(self, number: int, time: int) -> int:
        ends = [end for began, end in self.syncs.get(number, ()) if began > time]
        return min(ends, default=NEVER)

    def _put_first(self, path: str, content: bytes | None) -> None:
        parent, name = os.path.split(path)
        number = self._new(content is None)
        place = self._find(parent or ".", self.directories)
        assert place is not None, f"{path}: its directory is not in the tree"
        self.directories[place][name] = number
        if content is None:
            self.directories[number] = {}
        else:
            self.files[number] = content

    def _new(self, is_directory: bool) -> int:
        number = self._next
        self._next += 1
        if is_directory:
            self.names[number] = {}
        return number

    def _find(self, path: str, names: Mapping[int, Mapping[str, int]] | None = None) -> int | None:
        number = _TOP
        for part in () if path == "." else path.split(os.sep):
            found = (self.names if names is None else names).get(number, {}).get(part)
            if found is None:
                return None
            number = found
        return number

    def _place(self, path: str) -> tuple[int, str]:
        parent, name = os.path.split(path)
        directory = self._find(parent or ".")
        if directory is None:
            raise ValueError(f"{path}: its directory is not known; is `before` the whole tree?")
        return directory, name

    def _apply(self, operation: FileOperation) -> None:
        name = operation.name
        if name in _UNKNOWN:
            raise ValueError(f"the model of a disk does not know {name}: {operation}")
        if operation.path.endswith(_DELETED):
            # What has no name any more is of no interest to anybody after a power cut.
            return
        if name in SYNCS:
            number = self._find(operation.path)
            if number is not None and operation.ended is not None:
                self.syncs.setdefault(number, []).append((operation.began, operation.ended))
        elif name in WRITES or name in ("posix_fallocate", "ftruncate"):
            self._write(operation)
        elif name in ("rename", "replace", "renameat2"):
            self._rename(operation)
        elif name == "link":
            assert operation.target is not None
            place, number = self._place(operation.target), self._find(operation.path)
            self._rename_to(operation, [(*place, number)], (place[0],))
        elif name in ("unlink", "remove", "rmdir"):
            place = self._place(operation.path)
            self._rename_to(operation, [(*place, None)], (place[0],))
        elif name == "mkdir" or (name == "open" and operation.flags & (os.O_CREAT | os.O_TRUNC)):
            self._make(operation)

    def _make(self, operation: FileOperation) -> None:
        found = self._find(operation.path)
        if found is None:
            place = self._place(operation.path)
            number = self._new(operation.name == "mkdir")
            if operation.name != "mkdir":
                self.files[number] = b""
            self._rename_to(operation, [(*place, number)], (place[0], number))
        elif operation.flags & os.O_TRUNC:
            time = _time_of(operation)
            self.effects.append(DataEffect(time, str(operation), found, 0, None, 0, exact=True))

    def _rename(self, operation: FileOperation) -> None:
        assert operation.target is not None
        first, second = self._place(operation.path), self._place(operation.target)
        source, target = (self.names[place].get(name) for place, name in (first, second))
        exchanged = operation.name == "renameat2" and operation.flags & _EXCHANGE
        changes = [(*first, target if exchanged else None), (*second, source)]
        self._rename_to(operation, changes, (first[0], second[0]))

    def _rename_to(
        self,
        operation: FileOperation,
        changes: Sequence[tuple[int, str, int | None]],
        needs: tuple[int, ...],
    ) -> None:
        for directory, name, number in changes:
            if number is None:
                self.names[directory].pop(name, None)
            else:
                self.names[directory][name] = number
        time = _time_of(operation)
        self.effects.append(NameEffect(time, str(operation), tuple(changes), needs))

    def _write(self, operation: FileOperation) -> None:
        file = self._find(operation.path)
        if file is None:
            raise ValueError(f"{operation.path}: not known; is `before` the whole tree?")
        exact = operation.name == "ftruncate"
        offset = 0 if exact else operation.offset or 0
        data = operation.data
        length = offset + (operation.nbytes or 0 if data is None else len(data))
        time = _time_of(operation)
        self.effects.append(DataEffect(time, str(operation), file, offset, data, length, exact))


def _time_of(operation: FileOperation) -> int:
    """Return from when on an operation has to be reckoned with: an fsync from its beginning."""
    ended = operation.began if operation.ended is None else operation.ended
    return operation.began if operation.name in SYNCS else ended
