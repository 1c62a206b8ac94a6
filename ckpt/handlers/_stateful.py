"""The stateful handler, for objects that know their own state, such as data iterators and samplers.

An object needs one of these protocols, whatever its class:

- coroutines `save(directory)` and `load(directory)` of two phases, as in Grain's iterators
- `get_state()` and `set_state(state)`
- `state_dict()` and `load_state_dict(state)`

Two-phase objects, which save themselves into a directory. `await item.save(directory)` takes the
snapshot and returns an awaitable that writes; `await item.load(directory)` returns one that reads.
Grain's iterators are such objects, as are all objects that Orbax takes as stateful. They get a
temporary local directory. Its files go through the engine, so they have digests, are durable, and
work on every store.
"""

from __future__ import annotations

import contextlib
import inspect
import mmap
import os
import re
import stat
import tempfile
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import anyio
import jax
from msgspec import Struct
from msgspec.structs import replace

from ckpt._format.manifest import ItemEntry, JsonValue
from ckpt._format.per_process import renamed
from ckpt._format.step_files import check_file_path
from ckpt._plan.adapt import Adapt
from ckpt.errors import (
    CorruptCheckpointError,
    HandlerError,
    InvalidArgumentError,
    TargetMismatchError,
)
from ckpt.handlers._base import Deferred, ItemReader, ItemWriter, entry_data, text_of
from ckpt.handlers._json import json_bytes, json_value
from ckpt.handlers._pytree import PyTreeHandler
from ckpt.handlers._tree_file import encode_tree, load_tree

_MOST_FILES = 10_000


class _AwaitedDirectory:
    """The argument of `save`: a directory that exists once it has been awaited."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __truediv__(self, name: str) -> _AwaitedDirectory:
        return _AwaitedDirectory(self.path / name)

    async def await_creation(self) -> Path:
        return self.path


class TwoPhaseSave:
    """A save between its two phases. Either `finish` or `close` is called."""

    def __init__(self, directory: tempfile.TemporaryDirectory[str], writing: Any) -> None:
        """Hold `writing`, which will write into `directory`."""
        self._directory = directory
        self._writing = writing

    async def finish(self, writer: ItemWriter) -> dict[str, int]:
        """Let the object write, and write its files to the step; return their sizes by path.

        Paths that name the process are returned as those of a single process.

        Raises:
            HandlerError: The object wrote anything but regular files with plain names.
        """
        root = Path(self._directory.name)
        try:
            writing, self._writing = self._writing, None
            await writing
            sizes = await writer.in_thread(_files_below, root)
            for path in sizes:
                with _mapped(root / path) as data:
                    await writer.write_file(path, data)
            if writer.processes == 1:
                return sizes
            return {renamed(path, 0, 1): size for path, size in sizes.items()}
        finally:
            with anyio.CancelScope(shield=True):
                await writer.in_thread(self._directory.cleanup)

    def close(self) -> None:
        _give_up(self._writing)
        self._directory.cleanup()


async def begin_save(item: Any, writer: ItemWriter) -> TwoPhaseSave:
    """Let `item` take its snapshot.

    Raises:
        HandlerError: `save` did not return an awaitable.
    """
    directory = await writer.in_thread(_new_directory)
    try:
        writing = await item.save(_AwaitedDirectory(Path(directory.name)))
        if not hasattr(writing, "__await__"):
            raise HandlerError(
                f"{type(item).__name__}.save returned {writing!r:.80}: expected an awaitable that "
                "writes the files"
            )
        return TwoPhaseSave(directory, writing)
    except BaseException:
        directory.cleanup()
        raise


async def finish_load(item: Any, names: Sequence[str], reader: ItemReader) -> None:
    """Let `item` load itself from a copy of its files.

    Raises:
        CorruptCheckpointError: A file is missing, cut short or changed; nothing was loaded.
    """
    directory = await reader.in_thread(_new_directory)
    try:
        for name in names:
            data = await reader.read_file(name)
            # The object looks for the file of its own process.
            own = renamed(name, reader.process, reader.processes)
            await reader.in_thread(_write, Path(directory.name) / own, data)
        reading = await item.load(Path(directory.name))
        if hasattr(reading, "__await__"):
            await reading
    finally:
        with anyio.CancelScope(shield=True):
            await reader.in_thread(directory.cleanup)


def _new_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="ckpt-", ignore_cleanup_errors=True)


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _give_up(writing: Any) -> None:
    """End an awaitable that will not be awaited: a coroutine, or a task that already runs."""
    for name in ("close", "cancel"):
        end = getattr(writing, name, None)
        if callable(end):
            end()
            return


def _files_below(root: Path) -> dict[str, int]:
    """Return the sizes of all files below `root` by relative path."""
    sizes: dict[str, int] = {}
    for directory, names, files in os.walk(root):
        for name in (*names, *files):
            path = Path(directory, name)
            relative = path.relative_to(root).as_posix()
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode):
                continue
            try:
                check_file_path(relative)
            except ValueError as error:
                raise HandlerError(
                    f"its object wrote a file that cannot be kept: {error}"
                ) from None
            if not stat.S_ISREG(status.st_mode):
                raise HandlerError(
                    f"its object wrote {relative!r:.120}, which is not a regular file"
                )
            sizes[relative] = status.st_size
            if len(sizes) > _MOST_FILES:
                raise HandlerError(f"its object wrote more than {_MOST_FILES} files")
    return sizes


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[bytes | mmap.mmap]:
    """Yield the content of a file without reading it into memory."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            yield b""
            return
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            yield data
        finally:
            # A remaining view, such as one in the traceback of an error, keeps the mapping open.
            with contextlib.suppress(BufferError):
                data.close()


# The files are named as if one process saved, as Grain names its own. If several processes save,
# the engine keeps their files apart.
_PROCESSES = 1
_STEM = f"process_0-of-{_PROCESSES}"
_SUFFIXES = {"bytes": ".bin", "json": ".json", "tree_file": ".tree"}
_AS_IT_IS = Adapt()
_OTHER_PROCESS = re.compile(r"(?:^|/)process_\d+-of-(\d+)\.")
# The protocols by their names in the manifest, in the order in which they are tried.
_TWO_PHASES = "save_load"
_PROTOCOLS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        _TWO_PHASES: ("save", "load"),
        "get_state": ("get_state", "set_state"),
        "state_dict": ("state_dict", "load_state_dict"),
    }
)


class StatefulHandler:
    """Saves the state of an object, and sets it on an object like it.

    Example:
        ```python
        await mgr.save(step, items={"model": state, "data": iterator}, durable=True)
        await mgr.restore(step, items={"model": state, "data": iterator})
        ```
    """

    name = "stateful"
    per_process = True

    def accepts(self, item: Any) -> bool:
        """Return True if `item` has one of the protocols, and is not a tree to jax."""
        return _protocol_of(item) is not None and jax.tree_util.all_leaves([item])

    async def stage(self, item: Any, writer: ItemWriter) -> Awaitable[ItemEntry]:
        """Ask the object for its state; see `Handler.stage`.

        Raises:
            InvalidArgumentError: The object has none of the protocols.
            UnsupportedLeafError: The state is neither bytes nor JSON values nor a tree of leaves
                that can be stored.
        """
        protocol = _protocol_of(item)
        if protocol is None:
            raise InvalidArgumentError(
                f"an object of type {type(item).__name__} has no state to ask for: it needs "
                "get_state and set_state, state_dict and load_state_dict, or coroutines save and "
                "load"
            )
        if protocol == _TWO_PHASES:
            return await self._stage_files(item, writer)
        data: dict[str, JsonValue] = {"protocol": protocol, "process_count": _PROCESSES}
        alone = writer.processes == 1
        state = await writer.in_thread(_get_state, item, _PROTOCOLS[protocol][0], alone)
        if not isinstance(state, _Encoded):
            # A state must come back unchanged, and formats are for the arrays of models.
            await writer.stage(state, formatted=False)

        async def commit() -> ItemEntry:
            if not isinstance(state, _Encoded):
                return ItemEntry(handler=self.name, data={**data, "form": "tree"})
            await writer.write_file(_STEM + _SUFFIXES[state.form], state.data)
            return ItemEntry(
                handler=self.name, nbytes=len(state.data), data={**data, "form": state.form}
            )

        return Deferred(commit)

    async def _stage_files(self, item: Any, writer: ItemWriter) -> Awaitable[ItemEntry]:
        save = await begin_save(item, writer)

        async def commit() -> ItemEntry:
            return files_entry(await save.finish(writer))

        return Deferred(commit, save.close)

    async def load(self, entry: ItemEntry, like: Any, adapt: Adapt, reader: ItemReader) -> Any:
        """Set the state on `like` and return it; without `like`, return the state itself.

        The state of a two-phase object is a dict of the bytes of its files, or the value of its
        only file if that is JSON. For a state that is a tree, `like` can also be a target of that
        tree.

        Raises:
            TargetMismatchError: `like` lacks the protocol with which the state was saved, or
                another number of processes saved it.
            CorruptCheckpointError: The stored state is damaged.
        """
        data = entry_data(entry, self.name)
        protocol = text_of(data, "protocol")
        if protocol not in _PROTOCOLS:
            raise CorruptCheckpointError(f"{protocol!r:.40} is not a known protocol")
        names = _files_of(data) if protocol == _TWO_PHASES else []
        _check_processes(data, names)
        is_tree = data.get("form") in ("tree", "tree_file")
        if like is not None and is_tree and not jax.tree_util.all_leaves([like]):
            return await self._read_state(entry, text_of(data, "form"), reader, like, adapt)
        if protocol == _TWO_PHASES and len(names) == 1 and not _has(like, protocol):
            # An object stores nothing but its state, so its only file is its state.
            other = _protocol_of(like)
            if other is not None:
                state = await reader.read_file(names[0])
                await reader.in_thread(_set_state, like, *_PROTOCOLS[other], state)
                return like
        if like is not None and not _has(like, protocol):
            raise TargetMismatchError(
                f"the state was saved with {' and '.join(_PROTOCOLS[protocol])}; like= must be an "
                f"object that has them, and is {like!r:.80}"
            )
        if protocol == _TWO_PHASES:
            if like is None:
                return await _raw_files(names, reader)
            await finish_load(like, names, reader)
            return like
        state = await self._read_state(entry, text_of(data, "form"), reader)
        if like is None:
            return state
        await reader.in_thread(getattr(like, _PROTOCOLS[protocol][1]), state)
        return like

    async def _read_state(
        self,
        entry: ItemEntry,
        form: str,
        reader: ItemReader,
        like: Any = None,
        adapt: Adapt = _AS_IT_IS,
    ) -> Any:
        if form == "tree":
            tree = replace(entry, handler=PyTreeHandler.name)
            return await PyTreeHandler().load(tree, like, adapt, reader)
        if form not in _SUFFIXES:
            raise CorruptCheckpointError(f"{form!r:.40} is not a known form of a state")
        found = await reader.read_file(_STEM + _SUFFIXES[form])
        if form == "tree_file":
            return await load_tree(found, like, adapt, reader)
        return found if form == "bytes" else await reader.in_thread(json_value, found)


class _Encoded(Struct, frozen=True):
    """A state that becomes one file."""

    form: str
    data: bytes


def _get_state(item: Any, method: str, alone: bool) -> Any:
    """Return the state as a file; or, if it is a tree and one process saves alone, the tree."""
    state = getattr(item, method)()
    if isinstance(state, bytes | bytearray):
        return _Encoded("bytes", bytes(state))
    try:
        return _Encoded("json", json_bytes(state))
    except InvalidArgumentError:
        return state if alone else _Encoded("tree_file", encode_tree(state))


def _set_state(item: Any, get: str, set_: str, data: bytes) -> None:
    """Set the state of an object from a file: as bytes if its state is bytes, else as JSON."""
    is_bytes = isinstance(getattr(item, get)(), bytes | bytearray)
    getattr(item, set_)(data if is_bytes else json_value(data))


def files_entry(sizes: Mapping[str, int]) -> ItemEntry:
    """Return the entry of an object that wrote its state into files of these sizes.

    Paths with the number of a process must have that of a single process.
    """
    data: dict[str, JsonValue] = {"protocol": _TWO_PHASES, "process_count": _PROCESSES}
    data["files"] = [*sorted(sizes)]
    return ItemEntry(StatefulHandler.name, nbytes=sum(sizes.values()), data=data)


def _protocol_of(item: Any) -> str | None:
    return next((protocol for protocol in _PROTOCOLS if _has(item, protocol)), None)


def _has(item: Any, protocol: str) -> bool:
    # Only methods of the class count: an object can make up any attribute that it is asked for.
    kind = type(item)
    found = [getattr(kind, name, None) for name in _PROTOCOLS[protocol]]
    if isinstance(item, type) or not all(map(callable, found)):
        return False
    if protocol != _TWO_PHASES:
        return not any(map(inspect.iscoroutinefunction, found))
    return all(inspect.iscoroutinefunction(each) and _takes_one(each) for each in found)


def _takes_one(method: Any) -> bool:
    """Return True if a method takes one argument beside the object."""
    try:
        inspect.signature(method).bind(None, None)
    except (TypeError, ValueError):
        return False
    return True


def _files_of(data: dict[str, JsonValue]) -> list[str]:
    files = data.get("files")
    if not isinstance(files, list) or not all(isinstance(each, str) for each in files):
        raise CorruptCheckpointError("its entry in the manifest lacks the list of its files")
    return [str(each) for each in files]


def _check_processes(data: dict[str, JsonValue], names: Sequence[str]) -> None:
    counts = {data.get("process_count")}
    for name in names:
        match = _OTHER_PROCESS.search(name)
        if match is not None and len(match[1]) < 10:
            counts.add(int(match[1]))
    wrong = next((count for count in counts if count != _PROCESSES), _PROCESSES)
    if type(wrong) is not int:
        raise CorruptCheckpointError("its entry in the manifest lacks the number of processes")
    if wrong != _PROCESSES:
        raise TargetMismatchError(
            f"the state is that of one of {wrong} processes, and this run has {_PROCESSES}: a data "
            "iterator cannot be divided again. Restore with as many processes, or without this "
            "item"
        )


async def _raw_files(names: Sequence[str], reader: ItemReader) -> Any:
    found = {name: await reader.read_file(name) for name in names}
    if len(found) == 1 and names[0].endswith(".json"):
        return await reader.in_thread(json_value, found[names[0]])
    return found
