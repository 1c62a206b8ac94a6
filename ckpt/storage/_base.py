"""`Storage`: the protocol of every store, with its steps, attempts, files and notes.

A store holds *step directories*; the directory of a one-shot checkpoint is called so as well. One
is committed if and only if its manifest validates. An *attempt* is one try at writing a
step directory, under a new random name. Publishing turns it into one in one atomic operation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from msgspec import Struct

from ckpt.errors import InvalidArgumentError, StepExistsError, StepNotFoundError

T = TypeVar("T")
_NOTE_PART = re.compile(r"^[A-Za-z0-9_.][A-Za-z0-9_.=+,@-]{0,199}\Z")
# The size of a file in stores that give sizes only with the content.
UNKNOWN_SIZE = -1
# Unix seconds beyond which nothing is a time.
_LATEST_TIME = 1e11


class Attempt(Protocol):
    """One try at writing a step directory.

    Attributes:
        step_dir: Name of the step directory it will become.
        id: Random hexadecimal id, unique to this try.
        folder: Folder of the step directory that will hold its files; empty for the step directory
            itself.
    """

    @property
    def step_dir(self) -> str:
        """Name of the step directory it will become."""

    @property
    def id(self) -> str:
        """Random id, unique to this try."""

    @property
    def folder(self) -> str:
        """Folder in the step directory that will hold its files; empty for the directory itself."""


class TrashEntry(Struct, frozen=True):
    """A step directory in the trash.

    Attributes:
        name: Its name there.
        step_dir: The name that it had.
        path: Where it is.
        deleted_ns: When it was moved there, in Unix nanoseconds.
        save: `Manifest.save` of it, which its copies on the disks of other processes have, too.
    """

    name: str
    step_dir: str
    path: str
    deleted_ns: int
    save: str = ""


class AttemptEntry(Struct, frozen=True):
    """An attempt that was listed: one under way, or what a dead writer left.

    Attributes:
        step_dir: Name of the step directory it would become; empty where only its lease is left.
        id: Its id.
        is_live: Whether its writer lives: False if a sweep would remove it, None if that cannot be
            told yet.
        age_seconds: How long ago it was begun, by the clock of its writer; None if it does not say.
        silent_seconds: How long ago its lease was last renewed; None if that is not known.
        nbytes: Bytes that were written of it; None where counting them is not cheap.
        owner: Host and process of its writer, for people.
        is_removal: Whether nothing is written but removed: a deleted step, or another's attempt.
    """

    step_dir: str
    id: str
    is_live: bool | None
    age_seconds: float | None = None
    silent_seconds: float | None = None
    nbytes: int | None = None
    owner: str = ""
    is_removal: bool = False


@runtime_checkable
class MapsFiles(Protocol):
    """A storage whose data files can be mapped into memory."""

    async def map_block(
        self,
        step_dir: str,
        path: str,
        offset: int,
        nbytes: int,
        then: Callable[[memoryview], None],
    ) -> None:
        """Map the bytes of a step directory's data file from `offset` on into memory.

        Args:
            step_dir: The step directory.
            path: The file in it.
            offset: Where in the file to begin.
            nbytes: How many bytes.
            then: Called with them, in a worker thread. They stay mapped as long as the memoryview
                or anything made of it lives, and can be written to, which changes nothing but the
                memory of this process. What it raises is raised here.

        Raises:
            CorruptCheckpointError: The file is missing, too short, or not a regular file.
        """


@runtime_checkable
class ReadsTails(Protocol):
    """A storage that reads the end of a file, without being told how long the file is."""

    async def read_tail(self, step_dir: str, path: str, most: int) -> tuple[bytes, int] | None:
        """Return the last bytes of a step directory's file, and its size; None if there is none.

        With an empty `step_dir`, it is a file of the root itself. In stores that do not tell the
        size of a file, it is `UNKNOWN_SIZE`.

        Args:
            step_dir: The step directory.
            path: The file in it.
            most: How many bytes; of a shorter file, all of them.

        Raises:
            CorruptCheckpointError: It is not a regular file.
        """


@runtime_checkable
class WritesParts(Protocol):
    """A storage that takes a data file in parts, so that all of it need not be in memory."""

    async def write_part(
        self, attempt: Attempt, path: str, offset: int, data: memoryview, *, is_last: bool
    ) -> None:
        """Write the next part of a new data file of the attempt; it is durable after the last one.

        `data` is in use until this returns, also if it raises or is cancelled.

        Args:
            attempt: The attempt.
            path: The file in it.
            offset: Where the part begins: 0, or where the one before has ended.
            data: The part.
            is_last: Whether the file ends with it.
        """


@runtime_checkable
class SharesFiles(Protocol):
    """A storage in which two step directories can have the same file, and either can go first."""

    @property
    def shares_files(self) -> bool:
        """Whether it can do so here, as far as known."""

    @property
    def shares_at_once(self) -> bool:
        """Whether it takes no longer than to open a file, so that a caller may wait for it."""

    async def share(
        self, attempt: Attempt, step_dir: str, files: Mapping[str, int]
    ) -> Sequence[str]:
        """Put durable files of a step directory into the attempt, at the same paths.

        Not a byte passes this program. A file that is missing, has another size or cannot be shared
        is left out, and the caller writes what it needs of it: sharing saves work, and must not
        fail a save. Files below 1 MiB may be left out, too, where a write takes no longer.

        Args:
            attempt: The attempt.
            step_dir: The step directory, of the same root; with the folder that its manifest names.
            files: Size in bytes of every file, by its path there.

        Returns:
            The paths of those that the attempt has now.
        """


@runtime_checkable
class LeavesFiles(Protocol):
    """A storage in which a writer can go on with the files that a dead one has left."""

    async def leave(self, attempt: Attempt) -> None:
        """End an attempt that will not be published, and let its files lie until a sweep."""

    async def left_at(self, step_dir: str) -> list[str]:
        """Return the directories of the root in which dead attempts at a step directory lie."""

    async def take_over(self, attempt: Attempt, left: str, paths: Sequence[str]) -> Sequence[str]:
        """Move files of a dead attempt into this one, at the same paths, and make them durable.

        A sweep may remove the dead attempt at the same time. A file that is gone, or cannot be
        moved, is left out, and the caller writes it.

        Args:
            attempt: The attempt.
            left: The directory of the dead one; see `left_at`.
            paths: The files; the caller knows that they are complete.

        Returns:
            The paths of those that the attempt has now.
        """


def can_share(storage: Storage) -> bool:
    """Tell whether two step directories of a storage can have the same file."""
    return isinstance(storage, SharesFiles) and storage.shares_files


class ReadsSteps(Protocol):
    """What a step is read from: all that a copy needs of its source."""

    @property
    def location(self) -> str:
        """The root, as messages show it."""

    @property
    def keeps_others(self) -> bool:
        """Whether files that others put into a step directory survive its removal or replacement.

        Otherwise they are moved away first; see `set_aside`.
        """

    async def exists(self, step_dir: str) -> bool:
        """Tell whether anything has that name, even if it is not a step directory."""

    async def read(self, step_dir: str, path: str, limit: int) -> bytes | None:
        """Return a small file of a step directory, or None if either does not exist.

        With an empty `step_dir`, it is a file of the root itself.

        Raises:
            CorruptCheckpointError: It is not a regular file, or larger than `limit` bytes.
        """

    async def read_block(
        self,
        step_dir: str,
        path: str,
        offset: int,
        target: memoryview,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Fill `target` with the bytes of a step directory's data file from `offset` on.

        With an empty `step_dir`, it is a file of the root itself.

        `target` is in use until this returns, also if it raises or is cancelled.

        Args:
            step_dir: The step directory.
            path: The file in it.
            offset: Where in the file to begin.
            target: What is filled.
            then: Called once it is filled, in a worker thread: on a disk in the one that has read
                the bytes, while they are in the cache of its core. What it raises is raised here.

        Raises:
            CorruptCheckpointError: The file is missing, too short, or not a regular file.
        """


class Storage(ReadsSteps, Protocol):
    """A root that holds step directories. All methods raise `StorageError` if the store fails."""

    @property
    def lease_seconds(self) -> float:
        """How many seconds after its lease was last renewed an attempt is still left alone."""

    @property
    def usual_file_bytes(self) -> int | None:
        """The best size of data files, roughly; None for the size that suits disks.

        Large items have larger files.
        """

    @property
    def largest_file_bytes(self) -> int:
        """The largest size of a file."""

    async def prepare(self) -> None:
        """Make the root if it is missing, and raise if it cannot hold step directories."""

    async def step_dirs(self) -> list[str]:
        """Return the names that may be step directories, committed or not, without attempts."""

    async def files(self, step_dir: str) -> dict[str, int | None]:
        """Return the size in bytes of every file below a step directory, by path relative to it.

        The size of anything that is not a regular file, such as a symbolic link or a FIFO, is None.
        In stores that do not list sizes it is `UNKNOWN_SIZE`.
        """

    async def stamps(self, step_dirs: Sequence[str], path: str) -> list[Hashable | None]:
        """Return for each a value that changes whenever its file `path` may have changed.

        None if the step directory or the file does not exist. This is much cheaper than reading the
        files.
        """

    async def fingerprint(self, step_dir: str, path: str) -> str | None:
        """Return a text that differs once a file was changed, and is the same on all hosts.

        None if it does not exist. This is much cheaper than reading the file. With an empty
        `step_dir`, it is a file of the root itself.
        """

    async def read_each(
        self,
        step_dirs: Sequence[str],
        path: str,
        limit: int,
        head: int,
        parse: Callable[[bytes, int], T | None],
    ) -> list[T | None]:
        """Read the file `path` of many step directories; return what `parse` makes of each.

        None if it does not exist, is not a regular file or is larger than `limit` bytes. `parse`
        gets at least the first `head` bytes of the file, and the size of all of it; if it makes
        None of a part, it gets the whole file. It runs in a thread and must not raise.
        """

    async def cut_files(self, expected: Mapping[str, Mapping[str, int]]) -> dict[str, str]:
        """Return the step directories in which a file is missing or has another size.

        Their manifest came first, and a copy is still under way or was interrupted; or they were
        damaged. A store in which that look costs a request for every file answers `{}`.

        Args:
            expected: By step directory, the size in bytes of files by path relative to it.

        Returns:
            By step directory, which file it is and what it has, for messages.
        """

    async def begin(self, step_dir: str) -> Attempt:
        """Begin an attempt, which no cleaner can take for abandoned while this process lives."""

    async def join(self, step_dir: str, attempt: str) -> Attempt:
        """Return an attempt that another process of this job has begun, to write files of it.

        The other process renews, publishes and removes it. `discard` only releases it here.

        Args:
            step_dir: Name of the step directory it will become.
            attempt: Its id.

        Raises:
            StorageError: It does not exist: this process sees another root, or it was removed.
        """

    async def renew(self, attempt: Attempt) -> None:
        """Renew the lease of an attempt. Call it well before `lease_seconds` are over."""

    async def write(self, attempt: Attempt, path: str, data: bytes) -> None:
        """Write a new small file of the attempt. It is durable on return.

        The manifest (`ckpt.json`) is the last file of an attempt. A store without atomic rename
        may hold it back until `publish`.
        """

    async def write_block(self, attempt: Attempt, path: str, data: memoryview) -> None:
        """Write a new data file of the attempt. It is durable on return.

        `data` is in use until this returns, also if it raises or is cancelled.
        """

    async def link(self, attempt: Attempt, path: str, folder: str = "") -> None:
        """Put a file of the step directory into the attempt that will replace it, at the same path.

        The path is relative to `folder`, if there is one. The file is not copied if the store can
        do without: files are never changed in place, so both may share its bytes, and each can be
        removed without the other. The file must be durable already.

        Raises:
            CorruptCheckpointError: The step directory has no such file, or it is not a regular
                file.
        """

    async def publish(
        self,
        attempt: Attempt,
        *,
        overwrite: bool,
        replacing: str | None = None,
        files: Mapping[str, int] | None = None,
    ) -> None:
        """Turn the attempt into its step directory, atomically and durably; its files are complete.

        Args:
            attempt: The attempt.
            overwrite: Whether an existing step directory is replaced, in the same atomic operation.
            replacing: Id of the attempt that the existing step directory came from. Exactly that
                step directory is replaced, whatever `overwrite` says; if it is gone, nothing is
                published.
            files: Size in bytes of every file of the attempt, by path. A store in which other
                programs can easily remove some of them, such as a file system, looks whether all
                are there, and publishes nothing otherwise.

        Raises:
            StepExistsError: The step directory exists and may not be replaced; the attempt stays.
            StepDeletedError: The step directory of `replacing` is gone; the attempt stays.
        """

    async def discard(self, attempt: Attempt, *, joined: bool = False) -> None:
        """Remove an attempt that will not be published. What cannot be removed is left to `sweep`.

        If other processes have `joined` it, they may still write to it, and what they write late
        must be removed, too.
        """

    async def remove(self, step_dir: str, *, attempt: str | None = None) -> bool:
        """Remove a step directory: first its name, atomically, then its bytes; False if it is gone.

        With `attempt`, it is removed only if its manifest is of that attempt.
        """

    async def move(self, step_dir: str, trash: str, *, listed: bool = True) -> str | None:
        """Move a step directory into a folder, atomically and durably; return its path there.

        None if it does not exist. `trash` is a folder below the root, or a path. It is made if it
        is missing; see `prepare_trash`. `listed` says whether `trashed` knows of it.
        """

    async def prepare_trash(self, trash: str) -> None:
        """Make the folder `trash`, and raise if step directories cannot be moved into it."""

    async def trashed(self, trash: str) -> list[TrashEntry]:
        """Return what was moved from this root into the folder `trash` and is still there."""

    async def undelete(self, trash: str, name: str, step_dir: str) -> None:
        """Make an entry of the trash the step directory `step_dir`, atomically and durably.

        Raises:
            StepExistsError: There is one of that name; the entry stays.
            StepNotFoundError: There is no such entry any more.
            CorruptCheckpointError: Files of it are missing; the entry stays.
        """

    async def purge(self, trash: str, name: str) -> None:
        """Remove an entry of the trash for good: first its name, then its bytes."""

    async def set_aside(self, step_dir: str, paths: Sequence[str]) -> str:
        """Move files of a step directory, durably, into a new folder beside it; return that folder.

        They are files that others put there, and the step directory is about to be removed or
        replaced.
        """

    async def attempts(self) -> list[AttemptEntry]:
        """Return what `begin` has made in this root and is still there; changes nothing.

        What it says of a dead writer is what `sweep` would find at the moment.
        """

    async def sweep(self) -> list[str]:
        """Remove what certainly dead writers left; return the names of what was removed.

        The id of an attempt is part of its name.
        """

    async def put_note(
        self, name: str, data: bytes, *, replace: bool, durable: bool = True
    ) -> bool:
        """Write a small file of the root beside the step directories, atomically and durably.

        Args:
            name: Folder and name (`metadata/_ROOT_METADATA`). The folder is made.
            data: Its content.
            replace: Whether an existing file of that name is replaced.
            durable: False is quicker, for notes whose name is what matters: all readers see the
                name at once, the content may follow a moment later, and a power cut may take both.

        Returns:
            False if the file exists and may not be replaced. It was not changed.
        """

    async def read_note(self, name: str, limit: int) -> bytes | None:
        """Return a file of the root, or None if it does not exist; see `read`."""

    async def notes(self, folder: str) -> dict[str, float]:
        """Return the age of every file of a folder of the root, in seconds, by name.

        Ages are measured by the clock of the store, from the last `put_note` or `touch_note`.
        """

    async def touch_note(self, name: str) -> bool:
        """Set the age of a file of the root back to 0; False if it does not exist."""

    async def drop_note(self, name: str, *, durable: bool = True) -> bool:
        """Remove a file of the root, durably or more quickly; False if it does not exist."""


def time_in(lease: Mapping[str, object], name: str) -> float | None:
    """Return a time that a lease tells, in Unix seconds; None if it does not."""
    found = lease.get(name)
    return float(found) if isinstance(found, int | float) and abs(found) < _LATEST_TIME else None


def owner_of(lease: Mapping[str, object]) -> str:
    """Return the host and process of the writer of a lease, for people; empty if unknown."""
    host, process = lease.get("host"), lease.get("pid")
    named = isinstance(host, str) and isinstance(process, int)
    return f"{host:.100}, process {process}" if named else ""


def undelete_exists(where: str) -> StepExistsError:
    """Return the error for a step that was not undeleted because there is one."""
    return StepExistsError(
        f"{where} exists, so it was not undeleted. Delete or move what is there first"
    )


def undelete_missing(where: str) -> StepNotFoundError:
    """Return the error for an entry of the trash that is gone."""
    return StepNotFoundError(f"{where} is not in the trash any more")


def note_parts(name: str) -> tuple[str, str]:
    """Return the folder of a note and its name in it.

    Raises:
        InvalidArgumentError: It is not the name of a note.
    """
    folder, _, file = name.partition("/")
    if any(part in (".", "..") or not _NOTE_PART.match(part) for part in (folder, file)):
        raise InvalidArgumentError(f"note {name!r:.120}: expected a folder and a name in it")
    return folder, file
