"""What every store must be able to do with steps, attempts and their files.

A store holds *entries*: directories named after steps (or one-shot checkpoints). An entry is
committed if and only if its manifest validates. An *attempt* is one try at writing an entry, under
a fresh random name nobody else uses; publishing makes it an entry in one atomic act.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeVar

__all__ = ["UNKNOWN_SIZE", "Attempt", "Storage"]

T = TypeVar("T")
# Of a file whose size the store tells only to those who read it.
UNKNOWN_SIZE = -1


class Attempt(Protocol):
    """One try at writing an entry.

    Attributes:
        entry: Name of the entry it will become.
        id: Random hexadecimal id, unique to this try.
        folder: Folder of the entry in which its files will lie; empty for the entry itself.
    """

    @property
    def entry(self) -> str:
        """Name of the entry it will become."""

    @property
    def id(self) -> str:
        """Random id, unique to this try."""

    @property
    def folder(self) -> str:
        """Folder of the entry in which its files will lie; empty for the entry itself."""


class Storage(Protocol):
    """A root that holds entries. Every method raises `StorageError` for what the store refuses."""

    @property
    def location(self) -> str:
        """The root, as users write it."""

    @property
    def lease_seconds(self) -> float:
        """How long the attempts of a writer that does not renew its leases are left alone."""

    @property
    def usual_file_bytes(self) -> int | None:
        """About how large data files are best; None for what is best on a disk.

        Those of large items are larger.
        """

    @property
    def largest_file_bytes(self) -> int:
        """How large a file may be."""

    @property
    def keeps_others(self) -> bool:
        """Whether files of others in an entry stay when it is removed or replaced.

        Otherwise they are moved out of it before; see `set_aside`.
        """

    async def prepare(self) -> None:
        """Make the root if it is not there; raise if it cannot hold entries."""

    async def entries(self) -> list[str]:
        """Return the names below the root that may be entries; committed or not, attempts not."""

    async def exists(self, entry: str) -> bool:
        """Tell whether anything bears the name of an entry, be it one or not."""

    async def files(self, entry: str) -> dict[str, int | None]:
        """Return the size in bytes of every file below an entry, by path relative to it.

        What is neither a directory nor a regular file (a symbolic link, a FIFO) has the size None.
        Where the store does not tell sizes, they are `UNKNOWN_SIZE`.
        """

    async def read(self, entry: str, path: str, limit: int) -> bytes | None:
        """Return a small file of an entry, or None where entry or file is not there.

        Raises:
            CorruptCheckpointError: The file is not a regular one, or larger than `limit` bytes.
        """

    async def stamps(self, entries: Sequence[str], path: str) -> list[Hashable | None]:
        """Return what changes whenever the file `path` of each entry may have changed.

        None where entry or file is not there. Much cheaper than reading the files.
        """

    async def read_each(
        self, entries: Sequence[str], path: str, limit: int, parse: Callable[[bytes], T]
    ) -> list[T | None]:
        """Read the small file `path` of many entries; return what `parse` makes of each.

        None where it is not there, is no regular file or is larger than `limit` bytes. `parse` runs
        in a thread and must not raise.
        """

    async def begin(self, entry: str) -> Attempt:
        """Open an attempt that no cleaner can take for dead while this process lives."""

    async def join(self, entry: str, attempt: str) -> Attempt:
        """Return an attempt that another process of this job has begun, to write files of it.

        It is renewed, published and removed by that one; `discard` only lets go of it here.

        Args:
            entry: Name of the entry it will become.
            attempt: Its id.

        Raises:
            StorageError: It is not there: this process sees another root, or it was removed.
        """

    async def renew(self, attempt: Attempt) -> None:
        """Say that the writer of an attempt lives; to be called within `lease_seconds`, well."""

    async def write(self, attempt: Attempt, path: str, data: bytes) -> None:
        """Write a new small file of the attempt; durable on return.

        The manifest (`ckpt.json`) is the last file of an attempt. A store without atomic rename
        may keep it until `publish`.
        """

    async def write_block(self, attempt: Attempt, path: str, data: memoryview) -> None:
        """Write a new data file of the attempt; durable on return.

        `data` is read until this returns, also when it raises or is cancelled.
        """

    async def link(self, attempt: Attempt, path: str, folder: str = "") -> None:
        """Put a file of the entry that an attempt is for into the attempt, at the same path.

        The path is relative to `folder`, if there is one. The file is not copied where the store
        can do without. Files are never changed in place, so both may share its bytes, and each may
        be removed without the other. It must be durable already.

        Raises:
            CorruptCheckpointError: The entry has no such file, or it is no regular one.
        """

    async def read_block(self, entry: str, path: str, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes of an entry's data file from `offset` on.

        `target` is written until this returns, also when it raises or is cancelled.

        Raises:
            CorruptCheckpointError: The file is not there, is shorter, or is not a regular one.
        """

    def database_spec(self, entry: str, path: str) -> Any:
        """Return what TensorStore opens the directory `path` of an entry by.

        A URL of a key-value store, or a specification where a URL has no room for all.
        """

    async def publish(
        self, attempt: Attempt, *, overwrite: bool, replacing: str | None = None
    ) -> None:
        """Make the attempt its entry, atomically and durably; everything in it is whole by then.

        Args:
            attempt: The attempt.
            overwrite: Whether an existing entry is replaced, in the same atomic act.
            replacing: Id of the attempt that became the entry. That is replaced, whatever
                `overwrite` says, and nothing else; where it is gone, nothing is published.

        Raises:
            StepExistsError: The entry exists (and `overwrite` is False); the attempt is left.
            StepDeletedError: What `replacing` became is not there any more; the attempt is left.
        """

    async def discard(self, attempt: Attempt, *, joined: bool = False) -> None:
        """Remove an attempt that will not be published; what will not go is left to `sweep`.

        Where other processes have `joined` it, they may still write to it: what comes late must not
        stay for ever.
        """

    async def remove(self, entry: str, *, attempt: str | None = None) -> bool:
        """Remove an entry: first atomically out of sight, then its bytes. False if not there.

        With `attempt`, only if its manifest is of that attempt; otherwise it stays.
        """

    async def move(self, entry: str, trash: str) -> str | None:
        """Move an entry into a folder, atomically and durably; return its path there.

        None if it is not there. `trash` is a folder below the root, or a path; it is made if it
        is missing, see `prepare_trash`.
        """

    async def prepare_trash(self, trash: str) -> None:
        """Make the folder `trash`, and raise if entries cannot be moved into it."""

    async def set_aside(self, entry: str, paths: Sequence[str]) -> str:
        """Move files out of an entry, durably, into a folder beside it; return that folder.

        Nothing is replaced there: a name that is taken gets a number behind it.
        """

    async def sweep(self) -> list[str]:
        """Remove what provably dead writers left; return the names of what was removed."""

    async def put_note(
        self, name: str, data: bytes, *, replace: bool, durable: bool = True
    ) -> bool:
        """Write a small file of the root beside the entries, atomically and durably.

        Args:
            name: Folder and name (`metadata/_ROOT_METADATA`); the folder is made.
            data: Its content.
            replace: Whether a file of that name is replaced.
            durable: Without it the name alone counts, at once and for everybody: the content may
                come a moment later, and a power cut may take both. Quicker.

        Returns:
            False if it exists and is not to be replaced; it was left as it is.
        """

    async def read_note(self, name: str, limit: int) -> bytes | None:
        """Return a file of the root, or None if it is not there; see `read`."""

    async def notes(self, folder: str) -> dict[str, float]:
        """Return the age of every file of a folder of the root, in seconds, by name.

        Ages are by the store's own clock, from the last `put_note` or `touch_note`.
        """

    async def touch_note(self, name: str) -> bool:
        """Let the age of a file of the root begin anew; False if it is not there."""

    async def drop_note(self, name: str, *, durable: bool = True) -> bool:
        """Remove a file of the root, durably or quicker; False if it is not there."""
