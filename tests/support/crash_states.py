"""Every state in which a power cut may leave a directory, made of a record of file operations.

What was not synced may be lost, in any order: so says POSIX, and disks do it. Of each moment of a
record these are the states: with all that had happened by then; without one, and without two of the
operations that were not durable yet; with one of those only, and with none. Of a write that was
not durable there may also be the length without the bytes (zeros), or the first half.

```python
before = read_tree(root)
with FaultyFiles(root, sync=False) as files:
    save(root)
    heard = files.now()
for state in crash_states(before, files.operations):
    state.write(other)
    check(other, must_be_there=state.may_follow(heard))
```

The idea is that of ALICE (Pillai et al., OSDI 2014).
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.disk_model import NEVER, DataEffect, DiskModel, Effect, NameEffect, Tree
from tests.support.faults import FileOperation

__all__ = ["CrashState", "crash_states", "read_tree", "write_tree"]

# What became of an effect: all of it is there unless this says something else.
_LOST = "lost"
_ZEROS = "zeros in place of"
_HALF = "half of"
_Fates = frozenset[tuple[int, str]]


@dataclass(frozen=True, slots=True)
class CrashState:
    """A state in which a power cut may leave the directory.

    Attributes:
        tree: What it holds.
        first: The first moment of the record at which that may happen.
        last: The last one, if no other operation follows: see `FaultyFiles.now`.
        missing: What of the record did not reach the disk, in one of the ways to this state.
    """

    tree: Tree
    first: int
    last: int
    missing: tuple[str, ...]

    def may_follow(self, time: int) -> bool:
        """Tell whether a power cut at that time, or later, may leave this."""
        return self.last >= time

    def write(self, directory: Path) -> None:
        """Make the state a real directory, which must not exist."""
        write_tree(self.tree, directory)


def read_tree(directory: Path) -> dict[str, bytes | None]:
    """Return all that lies below a directory, which may be missing."""
    tree: dict[str, bytes | None] = {}
    for top, directories, files in os.walk(directory):
        for name in directories:
            tree[os.path.relpath(os.path.join(top, name), directory)] = None
        for name in files:
            path = os.path.join(top, name)
            tree[os.path.relpath(path, directory)] = Path(path).read_bytes()
    return tree


def write_tree(tree: Tree, directory: Path) -> None:
    """Write what `read_tree` returned to a directory that must not exist."""
    directory.mkdir(parents=True)
    for path in sorted(tree):
        content = tree[path]
        if content is None:
            (directory / path).mkdir()
        else:
            (directory / path).write_bytes(content)


def crash_states(
    before: Tree, operations: Iterable[FileOperation], *, losses: int = 2
) -> list[CrashState]:
    """Return every state in which a power cut may leave a directory, each once.

    Args:
        before: What it held before the first of the operations, all of it durable; see
            `read_tree`.
        operations: What was done to it, as `FaultyFiles` recorded it. Those that failed changed
            nothing; what `FaultyFiles` does not see must not have happened.
        losses: How many operations are lost at the same time, besides all and all but one.

    Raises:
        ValueError: The operations do not fit the tree, or the model does not know one.
    """
    model = DiskModel.of(before, operations)
    builder = _Builder(model)
    found: dict[bytes, CrashState] = {}
    seen: dict[tuple[int, _Fates], bytes] = {}
    for first, last, count, pending in _moments(model):
        for fates in _all_fates(model.effects, pending, losses):
            way = _shortened(count, fates)
            key = seen.get(way)
            if key is None:
                key = seen[way] = builder.key(*way)
            known = found.get(key)
            if known is None:
                missing = tuple(f"{fate} {model.effects[n].what}" for n, fate in sorted(fates))
                found[key] = CrashState(builder.tree(*way), first, last, missing)
            elif known.last < last:
                found[key] = CrashState(known.tree, known.first, last, known.missing)
    return list(found.values())


def _moments(model: DiskModel) -> Iterator[tuple[int, int, int, list[int]]]:
    """Yield spans of time, with how many effects had happened, and which were not durable."""
    durable = [model.durable_at(effect) for effect in model.effects]
    events = {0, *(effect.time for effect in model.effects)}
    events.update(time for time in durable if time != NEVER)
    times = sorted(events)
    for time, following in itertools.pairwise([*times, NEVER]):
        happened = [n for n, effect in enumerate(model.effects) if effect.time <= time]
        pending = [n for n in happened if durable[n] > time]
        yield time, following if following == NEVER else following - 1, len(happened), pending


def _all_fates(effects: Sequence[Effect], pending: Sequence[int], losses: int) -> Iterator[_Fates]:
    """Yield what may have become of the effects that are not durable."""
    fates = [[(number, fate) for fate in _fates_of(effects[number])] for number in pending]
    for count in range(losses + 1):
        for chosen in itertools.combinations(fates, count):
            for each in itertools.product(*chosen):
                yield frozenset(each)
    everything = frozenset((number, _LOST) for number in pending)
    yield everything
    for number in pending:
        yield everything - {(number, _LOST)}


def _fates_of(effect: Effect) -> tuple[str, ...]:
    if isinstance(effect, DataEffect) and effect.data:
        return (_LOST, _ZEROS, _HALF) if len(effect.data) > 1 else (_LOST, _ZEROS)
    return (_LOST,)


def _shortened(count: int, fates: _Fates) -> tuple[int, _Fates]:
    """Return the shortest way to say this: what is lost at the end might as well not have been."""
    while (count - 1, _LOST) in fates:
        fates -= {(count - 1, _LOST)}
        count -= 1
    return count, fates


class _Builder:
    """Makes trees of a model's effects and what became of them."""

    def __init__(self, model: DiskModel) -> None:
        self._model = model
        self._contents: dict[tuple[int, tuple[tuple[int, str], ...]], tuple[bytes, bytes]] = {}

    def key(self, count: int, fates: _Fates) -> bytes:
        """Return a digest of the tree that the first `count` effects lead to."""
        found = hashlib.blake2b(digest_size=16)
        for path, content in sorted(self._walk(count, fates)):
            found.update(path.encode() + b"\0" + (b"/" if content is None else content[0]))
        return found.digest()

    def tree(self, count: int, fates: _Fates) -> Tree:
        """Return that tree."""
        walk = self._walk(count, fates)
        return {path: None if content is None else content[1] for path, content in walk}

    def _walk(self, count: int, fates: _Fates) -> Iterator[tuple[str, tuple[bytes, bytes] | None]]:
        names = {number: dict(each) for number, each in self._model.directories.items()}
        writes: dict[int, list[tuple[int, str]]] = {}
        fate_of = dict(fates)
        for number, effect in enumerate(self._model.effects[:count]):
            fate = fate_of.get(number, "")
            if isinstance(effect, DataEffect):
                writes.setdefault(effect.file, []).append((number, fate))
            elif fate != _LOST:
                _change_names(names, effect)
        waiting: list[tuple[str, int]] = [("", 0)]
        while waiting:
            top, directory = waiting.pop()
            for name, number in names.get(directory, {}).items():
                path = f"{top}{name}"
                if number in self._model.files:
                    yield path, self._content(number, tuple(writes.get(number, ())))
                else:
                    yield path, None
                    waiting.append((f"{path}{os.sep}", number))

    def _content(self, file: int, writes: tuple[tuple[int, str], ...]) -> tuple[bytes, bytes]:
        """Return digest and bytes of a file."""
        known = self._contents.get((file, writes))
        if known is not None:
            return known
        data = bytearray(self._model.files[file])
        for number, fate in writes:
            effect = self._model.effects[number]
            assert isinstance(effect, DataEffect)
            if fate != _LOST:
                _write(data, effect, fate)
        content = bytes(data)
        digest = hashlib.blake2b(content, digest_size=16).digest()
        self._contents[file, writes] = digest, content
        return digest, content


def _change_names(names: dict[int, dict[str, int]], effect: NameEffect) -> None:
    for directory, name, number in effect.changes:
        of_directory = names.setdefault(directory, {})
        if number is None:
            of_directory.pop(name, None)
        else:
            of_directory[name] = number


def _write(content: bytearray, effect: DataEffect, fate: str) -> None:
    data = effect.data or b""
    length = effect.length
    if fate == _HALF:
        data = data[: len(data) // 2]
        length = effect.offset + len(data)
    elif fate == _ZEROS:
        data = bytes(len(data))
    if effect.exact:
        del content[length:]
    content.extend(bytes(max(0, length - len(content))))
    content[effect.offset : effect.offset + len(data)] = data
