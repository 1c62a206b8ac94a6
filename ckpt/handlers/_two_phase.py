"""Two-phase objects, which save themselves into a directory.

`await item.save(directory)` takes the snapshot and returns an awaitable that writes;
`await item.load(directory)` returns one that reads. Grain's iterators are such objects, as are all
objects that Orbax takes as stateful. They get a temporary local directory. Its files go through the
engine, so they have digests, are durable, and work on every store.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio

from ckpt._format.step_files.item_file_names import check_file_path
from ckpt._format.step_files.per_process import renamed
from ckpt.errors import HandlerError
from ckpt.handlers._base import ItemReader, ItemWriter

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
