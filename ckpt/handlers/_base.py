"""The `Handler` protocol: how one kind of item becomes leaves and files, and comes back.

A handler says *what* an item is; the engine moves the bytes, so that budget, checksums, errors and
cancellation are the same for every handler.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

from ckpt._format.manifest import ItemEntry, JsonValue
from ckpt.errors import CheckpointError, CorruptCheckpointError, HandlerError, located

if TYPE_CHECKING:
    from ckpt._plan.adapt import Adapt
    from ckpt._plan.targets import ArrayRead

T = TypeVar("T")
# Content of a file to write; never changed while it is written.
FileData: TypeAlias = bytes | bytearray | memoryview | mmap.mmap


class Deferred(Generic[T]):
    """An awaitable that starts when it is awaited and may be dropped without a warning."""

    def __init__(
        self, function: Callable[[], Awaitable[T]], dropped: Callable[[], object] | None = None
    ) -> None:
        """Await `function()` when awaited; `dropped` is called if that never happens."""
        self._function = function
        self._dropped = dropped

    def __await__(self) -> Generator[Any, Any, T]:
        self._dropped = None
        return self._function().__await__()

    def close(self) -> None:
        """Give the awaitable up, unless it was awaited; idempotent."""
        dropped, self._dropped = self._dropped, None
        if dropped is not None:
            dropped()


class ItemWriter(Protocol):
    """The interface of the engine for a handler that saves one item."""

    @property
    def process(self) -> int:
        """Number of this process among those that save the step together."""

    @property
    def processes(self) -> int:
        """Number of processes that save the step together."""

    async def stage(self, tree: Any, *, formatted: bool = True) -> None:
        """Stage a tree of arrays; on return, changes that the caller makes do not affect it.

        The item's entry then gets the tree, its leaves and their bytes from the engine, once they
        are durable. This belongs into `Handler.stage`: in the commit it is too late for a snapshot.
        An item has at most one tree.

        Args:
            tree: The tree.
            formatted: True applies the formats of the save; with False every leaf is stored as it
                is.

        Raises:
            UnsupportedLeafError: A leaf or key cannot be stored; the message names its path.
            InvalidArgumentError: A tree was staged already, or the commit has begun.
        """

    async def write_file(self, path: str, data: FileData) -> None:
        """Write a file of the item; durable on return, with size and digest in the manifest.

        It waits until the save may write, so it belongs into the commit; in `Handler.stage` it
        would make the caller wait for the disk. A file named `metadata` must hold JSON: Orbax reads
        it.

        Args:
            path: Path relative to the item's directory; plain names with `/` between them.
            data: Contiguous bytes; they must not change until this returns or raises.

        Raises:
            InvalidArgumentError: The path leads elsewhere, is reserved, or was written before.
            StorageError: The store refused.

        Cancellation: a write that has begun is waited for.
        """

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Run a slow function off the engine's loop; a cancelled call waits for its end."""


class ItemReader(Protocol):
    """The interface of the engine for a handler that loads one item."""

    @property
    def item(self) -> str:
        """Name of the item."""

    @property
    def process(self) -> int:
        """Number of this process among those of the job that restores."""

    @property
    def processes(self) -> int:
        """Number of processes in the job that restores."""

    async def read(self, entry: ItemEntry, reads: Sequence[ArrayRead]) -> list[Any]:
        """Read arrays of an item, in the order of `reads`.

        Raises:
            CorruptCheckpointError: The stored bytes are damaged; the message names the leaf.
        """

    async def read_file(self, path: str) -> bytes:
        """Read a file of the item, whose size and digest are checked against the manifest.

        Raises:
            CorruptCheckpointError: The manifest has no such file, or the file is missing, cut or
                changed; the message names the item and the file.

        Cancellation: a read that has begun is waited for.
        """

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Run a slow function off the engine's loop; a cancelled call waits for its end."""


class Handler(Protocol):
    """How one kind of item is saved and loaded.

    Errors of its methods arrive as a `HandlerError`, unless they are errors of this library.

    A handler may have an attribute `per_process`: True if every process of a job stores an item of
    its own, such as the state of its data iterator. Without it all processes have the same item:
    they divide the arrays among them, and the primary writes everything else. With it the files of
    each process are kept apart, and `load` gets the entry that this process's `stage` gave. Such a
    handler stores only files; arrays that it stages are refused if there are several processes.

    Attributes:
        name: Stable name of the handler, which is written to disk; never a Python path.
    """

    @property
    def name(self) -> str:
        """Stable name of the handler, which is written to disk."""

    def accepts(self, item: Any) -> bool:
        """Return True if this handler saves objects such as `item`; must be quick."""

    async def stage(self, item: Any, writer: ItemWriter) -> Awaitable[ItemEntry]:
        """Take a snapshot of `item`; on return the caller may change or donate it.

        Returns:
            The commit, such as a `Deferred`: awaiting it writes the files of the item, and returns
            its manifest entry. The engine awaits it at most once. If it is never awaited, its
            method `close` is called, if it has one.

        Cancellation: passes through this call, and the snapshot is given up.
        """

    async def load(self, entry: ItemEntry, like: Any, adapt: Adapt, reader: ItemReader) -> Any:
        """Return the item of `entry`.

        Args:
            entry: The item's manifest entry.
            like: The target, or None for the item as it was saved.
            adapt: Differences allowed between the two; only for items with leaf paths.
            reader: The engine.

        Raises:
            TargetMismatchError: The item cannot be restored onto `like`.
            CorruptCheckpointError: The stored item is damaged.
        """


def is_per_process(handler: Handler) -> bool:
    """Return True if every process of a job stores an item of its own with this handler."""
    return bool(getattr(handler, "per_process", False))


@contextlib.contextmanager
def errors_of(handler: Handler, item: str, doing: str) -> Iterator[None]:
    """Turn errors of a handler into errors of this library that name the item.

    Args:
        handler: The handler whose code the body runs.
        item: Name of the item.
        doing: The task of the handler, for the message.

    Raises:
        HandlerError: The body raised another error than a `CheckpointError`. Anything but an
            `Exception`, such as a cancellation, passes unchanged.
    """
    try:
        with located(item=item):
            yield
    except CheckpointError:
        raise
    except Exception as error:
        name = getattr(handler, "name", type(handler).__name__)
        raise HandlerError(
            f"the handler {name!r:.80} could not {doing}: {type(error).__name__}: {error!s:.500}",
            item=item,
        ) from error


def entry_data(entry: ItemEntry, handler: str) -> dict[str, JsonValue]:
    """Return the data that a handler keeps in the manifest.

    Raises:
        CorruptCheckpointError: The entry is of another handler, or its `data` is not an object.
    """
    if entry.handler != handler or not isinstance(entry.data, dict):
        raise CorruptCheckpointError(
            f"its entry in the manifest is not one of the handler {handler!r}"
        )
    return entry.data


def text_of(data: dict[str, JsonValue], key: str) -> str:
    """Return a text that a handler keeps in the manifest.

    Raises:
        CorruptCheckpointError: The text is missing.
    """
    value = data.get(key)
    if not isinstance(value, str):
        raise CorruptCheckpointError(f"its entry in the manifest lacks the text {key!r}")
    return value
