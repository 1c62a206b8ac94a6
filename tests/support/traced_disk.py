"""A model of what a power cut would leave: fed with the system calls of a traced program.

A file's content, and a directory's entries, survive once an fsync of it that began after the last
change has ended. That is less than most file systems give, and all that POSIX promises.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["MODIFYING", "Disk", "system_calls"]

_SYNCS = {"fsync", "fdatasync"}
_OPENS = {"open", "openat"}
_WRITES = {"write", "pwrite64", "writev", "pwritev", "pwritev2", "ftruncate", "fallocate"}
_MAKES = {"mkdir", "mkdirat"}
_REMOVES = {"unlink", "unlinkat", "rmdir"}
_RENAMES = {"rename", "renameat", "renameat2"}
# Nothing here uses these; were it to begin, the model must learn them.
_UNKNOWN = {"creat", "link", "linkat", "symlink", "symlinkat", "truncate", "copy_file_range"}
_KNOWN = _SYNCS | _OPENS | _WRITES | _MAKES | _REMOVES | _RENAMES
# The calls to trace; `?` lets strace pass over one that this machine does not have.
MODIFYING = ",".join(f"?{name}" for name in sorted(_KNOWN | _UNKNOWN))

_LINE = re.compile(r"^(\d+) +(?:<\.\.\. (\w+) resumed>|(\w+)\()(.*)$")
_FD = re.compile(r"^\d+<([^>]*)>")
_AT = re.compile(r'(?:AT_FDCWD|\d+)?(?:<([^>]*)>)?(?:, )?"([^"]*)"')


class Disk:
    """Which paths have changed since they were last made durable."""

    def __init__(self) -> None:
        self._clock = 0
        self._changed: dict[str, int] = {}
        self._durable: dict[str, int] = {}

    def now(self) -> int:
        """Return a time later than every change so far."""
        self._clock += 1
        return self._clock

    def knows(self, path: str) -> bool:
        """Tell whether the traced program made or changed `path`."""
        return path in self._changed

    def synced(self, path: str, began: int) -> None:
        """An fsync of `path` that began at `began` has ended."""
        self._durable[path] = max(self._durable.get(path, 0), began)

    def is_durable_since(self, path: str, time: int) -> bool:
        """Tell whether an fsync of `path` that began after `time` has ended."""
        return self._durable.get(path, 0) > time

    def below(self, top: str) -> list[str]:
        """Return what the program made or changed below `top`."""
        return sorted(path for path in self._changed if path.startswith(top + os.sep))

    def not_durable(self, top: str, *, depth: int | None = None) -> list[str]:
        """Return `top`, and what is below it, as far as a power cut could take it."""
        paths = [path for path in (top, *self.below(top)) if path in self._changed]
        if depth is not None:
            paths = [p for p in paths if len(Path(p).relative_to(top).parts) < depth]
        return [p for p in paths if self._changed[p] > self._durable.get(p, 0)]

    def apply(self, name: str, paths: tuple[str, ...]) -> None:
        """Let one system call take effect."""
        if name == "change":
            self._change(paths[0])
        elif name == "make":
            self._change(paths[0])
            self._change(os.path.dirname(paths[0]))
        elif name == "remove":
            self._forget(paths[0])
            self._change(os.path.dirname(paths[0]))
        elif name in ("rename", "exchange"):
            source, target = paths
            taken = self._forget(source)
            given = self._forget(target)
            self._put(target, taken)
            if name == "exchange":
                self._put(source, given)
            self._change(os.path.dirname(source))
            self._change(os.path.dirname(target))

    def _change(self, path: str) -> None:
        self._changed[path] = self.now()

    def _forget(self, top: str) -> dict[str, tuple[int, int]]:
        found = {}
        for path in [top, *self.below(top)]:
            if path in self._changed:
                times = self._changed.pop(path), self._durable.pop(path, 0)
                found[path[len(top) :]] = times
        return found

    def _put(self, top: str, found: dict[str, tuple[int, int]]) -> None:
        for rest, (changed, durable) in found.items():
            self._changed[top + rest] = changed
            self._durable[top + rest] = durable


def system_calls(log: Path, disk: Disk) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield what the calls in an strace log (`-f -y`) did, each when it had ended.

    Names are `change`, `make`, `remove`, `rename`, `exchange` (with the absolute paths concerned)
    and `ack` (a write to standard output). An fsync goes to `disk` directly, with the time at which
    it began; a change counts from its end, which is the later and so the stricter choice.
    """
    begun: dict[str, tuple[str, str, int]] = {}
    for line in log.read_text(errors="replace").splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        process, resumed, name, rest = match.groups()
        if resumed:
            name, before, began = begun.pop(process)
            rest = before + rest
        else:
            began = disk.now()
        if rest.endswith("<unfinished ...>"):
            begun[process] = name, rest.removesuffix("<unfinished ...>"), began
            continue
        arguments, _, result = rest.rpartition(" = ")
        if not result.startswith(("-1", "?")):
            yield from _effects(name, arguments, result, disk, began)


def _effects(
    name: str, arguments: str, result: str, disk: Disk, began: int
) -> Iterator[tuple[str, tuple[str, ...]]]:
    if name in _SYNCS:
        disk.synced(_file(arguments), began)
    elif name in _WRITES:
        yield ("ack" if arguments.startswith("1<") else "change"), (_file(arguments),)
    elif name in _OPENS:
        if "O_CREAT" in arguments and not disk.knows(_file(result)):
            yield "make", (_file(result),)
        elif "O_TRUNC" in arguments:
            yield "change", (_file(result),)
    elif name in _MAKES:
        yield "make", _paths(arguments)
    elif name in _REMOVES:
        yield "remove", _paths(arguments)
    elif name in _RENAMES:
        yield ("exchange" if "RENAME_EXCHANGE" in arguments else "rename"), _paths(arguments)
    else:
        raise AssertionError(f"the model of the disk does not know {name}; teach it")


def _file(text: str) -> str:
    """Return the path of the file descriptor that `text` begins with."""
    match = _FD.match(text)
    return match[1] if match else ""


def _paths(arguments: str) -> tuple[str, ...]:
    """Return the absolute paths that a call was given."""
    return tuple(os.path.join(base or "/", path) for base, path in _AT.findall(arguments))
