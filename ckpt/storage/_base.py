"""`Storage`: the protocol of every store, with its steps, attempts, files and notes.

A store holds *step directories*; a one-shot checkpoint is a step directory, too. A step directory
is committed if and only if its manifest validates. An *attempt* is one try at writing a step
directory, under a new random name. Publishing an attempt turns it into the step directory in one
atomic operation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from msgspec import Struct

from ckpt.errors import InvalidArgumentError, StepExistsError, StepNotFoundError

T = TypeVar("T")
_NOTE_PART = re.compile(r"^[A-Za-z0-9_.][A-Za-z0-9_.=+,@-]{0,199}\Z")
# Size of a file in stores that give sizes only with the content.
UNKNOWN_SIZE = -1
# Unix seconds; larger numbers are not taken for times.
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
        name: Name in the trash.
        step_dir: Name before the deletion.
        path: Path in the trash.
        deleted_ns: Time of the deletion, in Unix nanoseconds.
        save: `Manifest.save`, which its copies on the disks of other processes have, too.
    """

    name: str
    step_dir: str
    path: str
    deleted_ns: int
    save: str = ""


class AttemptEntry(Struct, frozen=True):
    """An attempt in a list: under way, or left by a dead writer.

    Attributes:
        step_dir: Name of the step directory it would become; empty where only its lease is left.
        is_live: True if its writer lives, False if a sweep would remove it, None if that is not
            known yet.
        age_seconds: Seconds since it was begun, by the clock of its writer; None if unknown.
        silent_seconds: Seconds since its lease was last renewed; None if unknown.
        nbytes: Bytes written so far; None where counting them is not cheap.
        owner: Host and process of its writer, for people.
        is_removal: True if it is a removal under way: of a deleted step, or of another's attempt.
        directory: That of a dead attempt whose files another one can take over; otherwise empty.
    """

    step_dir: str
    id: str
    is_live: bool | None
    age_seconds: float | None = None
    silent_seconds: float | None = None
    nbytes: int | None = None
    owner: str = ""
    is_removal: bool = False
    directory: str = ""


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
            offset: Offset of the first byte in the file.
            nbytes: Number of bytes.
            then: Called with the bytes, in a worker thread. They stay mapped as long as the
                memoryview or anything made of it lives. Writing to them changes only the memory of
                this process. An error that `then` raises is raised here.

        Raises:
            CorruptCheckpointError: The file is missing, too short, or not a regular file.
        """


@runtime_checkable
class WritesParts(Protocol):
    """A storage that takes a data file in parts, so that it need not be in memory as a whole."""

    async def write_part(
        self, attempt: Attempt, path: str, offset: int, data: memoryview, *, is_last: bool
    ) -> None:
        """Write the next part of a new data file of the attempt; it is durable after the last one.

        `data` is in use until this returns, also if it raises or is cancelled.

        Args:
            attempt: The attempt.
            path: The file in it.
            offset: Offset of the part: 0, or the end of the part before.
            data: The part.
            is_last: True if the file ends with this part.
        """


@runtime_checkable
class LeavesFiles(Protocol):
    """A storage in which a writer can take over the files that a dead writer has left.

    `Storage.discard(attempt, keep_files=True)` leaves them there, too.
    """

    async def take_over(self, attempt: Attempt, left: str, paths: Sequence[str]) -> Sequence[str]:
        """Move files of a dead attempt into this one, at the same paths, and make them durable.

        A sweep may remove the dead attempt at the same time. A file that is gone, or cannot be
        moved, is left out, and the caller writes it.

        Args:
            attempt: The attempt.
            left: Directory of the dead attempt; see `AttemptEntry`.
            paths: The files; the caller knows that they are complete.

        Returns:
            The paths of the files that the attempt now has.
        """


@runtime_checkable
class HasDirectories(Protocol):
    """A storage on a disk: a step directory is removed or replaced with all that is in it.

    Elsewhere, files that others have put into a step directory stay.
    """

    async def set_aside(self, step_dir: str, paths: Sequence[str]) -> str:
        """Move files of a step directory, durably, into a new folder beside it; return that folder.

        This keeps files that others put into a step directory, before it is removed or replaced.
        """

    async def prepare_trash(self, trash: str) -> None:
        """Make the folder `trash`, and raise if step directories cannot be moved into it."""


class ReadsSteps(Protocol):
    """A place to read steps from: all that a copy needs of its source."""

    @property
    def location(self) -> str:
        """The root, as messages show it."""

    async def exists(self, step_dir: str) -> bool:
        """Return True if anything has that name, even if it is not a step directory."""

    async def read(self, step_dir: str, path: str, limit: int) -> bytes | None:
        """Return a small file of a step directory, or None if either does not exist.

        An empty `step_dir` means a file of the root itself.

        Raises:
            CorruptCheckpointError: The file is not a regular file, or larger than `limit` bytes.
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

        An empty `step_dir` means a file of the root itself.

        `target` is in use until this returns, also if it raises or is cancelled.

        Args:
            step_dir: The step directory.
            path: The file in it.
            offset: Offset of the first byte in the file.
            target: The buffer to fill.
            then: Called once the buffer is filled, in a worker thread: on a disk in the thread that
                has read the bytes, while they are in the cache of its core. An error that `then`
                raises is raised here.

        Raises:
            CorruptCheckpointError: The file is missing, too short, or not a regular file.
        """


class FileStamp(Struct, frozen=True):
    """A value that changes whenever a file may have changed.

    Attributes:
        version: The same on all hosts; it changes with the content.
        place: What this host alone knows of the file, and changes with it.
    """

    version: str
    place: tuple[int, ...] = ()


class StorageTraits(Struct, frozen=True):
    """What a storage can do.

    Attributes:
        lease_seconds: Seconds after the last renewal of its lease for which an attempt is left
            alone.
        largest_file_bytes: The largest size of a file.
        usual_file_bytes: The best size of data files, roughly; None for the size that suits disks.
            Large items have larger files.
        shares_files: True if step directories can share files, as far as known.
        shares_at_once: True if sharing a file takes no longer than opening one, so that callers may
            wait.
    """

    lease_seconds: float
    largest_file_bytes: int
    usual_file_bytes: int | None
    shares_files: bool
    shares_at_once: bool


class Storage(ReadsSteps, Protocol):
    """A root that holds step directories. All methods raise `StorageError` if the store fails."""

    @property
    def traits(self) -> StorageTraits:
        """What it can do; `shares_files` may change once that was tried."""

    async def prepare(self) -> None:
        """Make the root if it is missing, and raise if it cannot hold step directories."""

    async def step_dirs(self) -> list[str]:
        """Return the names that may be steps, committed or not, without attempts.

        They are the names of directories and, where the store can tell, of files whose names end in
        a number, like the steps of Flax.
        """

    async def files(self, step_dir: str) -> dict[str, int | None]:
        """Return the size in bytes of every file below a step directory, by path relative to it.

        The size of anything that is not a regular file, such as a symbolic link or a FIFO, is None.
        In stores that do not list sizes it is `UNKNOWN_SIZE`.
        """

    async def read_tail(self, step_dir: str, path: str, most: int) -> tuple[bytes, int] | None:
        """Return the last bytes of a step directory's file, and its size; None if there is none.

        An empty `step_dir` means a file of the root itself. The size is `UNKNOWN_SIZE` in stores
        that do not tell it.

        Args:
            step_dir: The step directory.
            path: The file in it.
            most: Number of bytes; a shorter file is returned whole.

        Raises:
            CorruptCheckpointError: The file is not a regular file.
        """

    async def stamps(self, step_dirs: Sequence[str], path: str) -> list[FileStamp | None]:
        """Return, by step directory, a value that changes whenever its file may have changed.

        The value is None if the step directory or its file `path` does not exist. This is much
        cheaper than reading the files. An empty name means a file of the root itself.
        """

    async def read_each(
        self,
        step_dirs: Sequence[str],
        path: str,
        limit: int,
        head: int,
        parse: Callable[[bytes, int], T | None],
    ) -> list[T | None]:
        """Read the file `path` of many step directories; return the result of `parse` for each.

        The result is None if the file does not exist, is not a regular file or is larger than
        `limit` bytes. `parse` gets at least the first `head` bytes of the file, and the size of all
        of it. If it returns None for a part, it gets the whole file. It runs in a thread and must
        not raise.
        """

    async def cut_files(self, expected: Mapping[str, Mapping[str, int]]) -> dict[str, str]:
        """Return the step directories in which a file is missing or has another size.

        Such a step directory is a copy that is under way or was interrupted, whose manifest came
        first, or it was damaged. A store that needs a request for every file to find out returns
        `{}`.

        Args:
            expected: By step directory, the size in bytes of files by path relative to it.

        Returns:
            By step directory, the file and what is wrong with it, for messages.
        """

    async def begin(self, step_dir: str) -> Attempt:
        """Begin an attempt, which no cleaner can take for abandoned while this process lives."""

    async def join(self, step_dir: str, attempt: str) -> Attempt:
        """Return an attempt that another process of this job has begun, to write files of it.

        The other process renews, publishes and removes it. `discard` only releases it here.

        Args:
            step_dir: Name of the step directory it will become.
            attempt: Id of the attempt.

        Raises:
            StorageError: The attempt does not exist: this process sees another root, or it was
                removed.
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

    async def share(
        self, attempt: Attempt, step_dir: str, files: Mapping[str, int]
    ) -> Sequence[str]:
        """Put durable files of a step directory into the attempt, at the same paths.

        The bytes do not pass through this program. A file that is missing, has another size or
        cannot be shared is left out, and the caller writes it: sharing saves work, and must not
        fail a save. Files below 1 MiB may be left out, too, where writing them takes no longer.

        Args:
            attempt: The attempt.
            step_dir: The step directory in the same root, with the folder that its manifest names.
            files: Size in bytes of every file, by its path in `step_dir`.

        Returns:
            The paths of the files that the attempt now has.
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
            overwrite: True replaces an existing step directory, in the same atomic operation.
            replacing: Id of the attempt that the existing step directory came from. Exactly that
                step directory is replaced, whatever `overwrite` says; if it is gone, nothing is
                published.
            files: Size in bytes of every file of the attempt, by path. A store in which other
                programs can easily remove some of them, such as a file system, checks that all are
                there, and publishes nothing otherwise.

        Raises:
            StepExistsError: The step directory exists and may not be replaced; the attempt stays.
            StepDeletedError: The step directory of `replacing` is gone; the attempt stays.
        """

    async def discard(
        self, attempt: Attempt, *, joined: bool = False, keep_files: bool = False
    ) -> None:
        """Remove an attempt that will not be published; a later `sweep` removes what remains.

        Args:
            attempt: The attempt.
            joined: True if other processes have joined the attempt. They may still write to it, and
                their late files must be removed, too.
            keep_files: True leaves its files to a sweep where a later attempt can take them over;
                see `LeavesFiles`.
        """

    async def remove(self, step_dir: str, *, attempt: str | None = None) -> bool:
        """Remove a step directory: first its name, atomically, then its bytes; False if it is gone.

        With `attempt`, it is removed only if its manifest is of that attempt.
        """

    async def move(self, step_dir: str, trash: str, *, listed: bool = True) -> str | None:
        """Move a step directory into a folder, atomically and durably; return its path there.

        None if it does not exist. `trash` is a folder below the root, or a path. It is made if it
        is missing; see `HasDirectories`. With `listed`, `trashed` returns the step directory.
        """

    async def trashed(self, trash: str) -> list[TrashEntry]:
        """Return the step directories of this root that are in the folder `trash`."""

    async def undelete(self, trash: str, name: str, step_dir: str) -> None:
        """Make an entry of the trash the step directory `step_dir`, atomically and durably.

        Raises:
            StepExistsError: There is a step directory of that name; the entry stays.
            StepNotFoundError: The entry is gone.
            CorruptCheckpointError: Files of the step are missing; the entry stays.
        """

    async def purge(self, trash: str, name: str) -> None:
        """Remove an entry of the trash for good: first its name, then its bytes."""

    async def attempts(self) -> list[AttemptEntry]:
        """Return the attempts in this root, without changing anything.

        A writer is reported as dead if `sweep` would take it for dead at this moment.
        """

    async def sweep(self) -> list[str]:
        """Remove the remains of writers that are certainly dead; return the removed names.

        The id of an attempt is part of its name.
        """

    async def put_note(
        self, name: str, data: bytes, *, replace: bool, durable: bool = True
    ) -> bool:
        """Write a small file of the root beside the step directories, atomically and durably.

        `read("", name, limit)` reads it.

        Args:
            name: Folder and name (`metadata/_ROOT_METADATA`). The folder is made.
            data: Its content.
            replace: True replaces an existing file of that name.
            durable: False is quicker, for notes of which only the name matters: all readers see the
                name at once, the content may follow a moment later, and a power cut may take both.

        Returns:
            False if the file exists and may not be replaced. It was not changed.
        """

    async def notes(self, folder: str) -> dict[str, float]:
        """Return the age of every file of a folder of the root, in seconds, by name.

        Ages are measured by the clock of the store, from the last `put_note` or `touch_note`.
        """

    async def touch_note(self, name: str) -> bool:
        """Set the age of a file of the root back to 0; False if it does not exist."""

    async def drop_note(self, name: str, *, durable: bool = True) -> bool:
        """Remove a file of the root, durably or more quickly; False if it does not exist."""


async def fingerprint(storage: Storage, step_dir: str, path: str) -> str | None:
    """Return a text that changes whenever a file changes, on any host; None if there is no file.

    An empty `step_dir` means a file of the root itself.
    """
    (found,) = await storage.stamps([step_dir], path)
    return None if found is None else found.version


def time_in(lease: Mapping[str, object], name: str) -> float | None:
    """Return a time from a lease, in Unix seconds; None if the lease has none."""
    found = lease.get(name)
    return float(found) if isinstance(found, int | float) and abs(found) < _LATEST_TIME else None


def owner_of(lease: Mapping[str, object]) -> str:
    """Return the host and process of the writer of a lease, for people; empty if unknown."""
    host, process = lease.get("host"), lease.get("pid")
    named = isinstance(host, str) and isinstance(process, int)
    return f"{host:.100}, process {process}" if named else ""


def undelete_exists(where: str) -> StepExistsError:
    return StepExistsError(
        f"{where} exists, so it was not undeleted. Delete or move what is there first"
    )


def undelete_missing(where: str) -> StepNotFoundError:
    return StepNotFoundError(f"{where} is not in the trash any more")


def note_parts(name: str) -> tuple[str, str]:
    """Return the folder of a note and its name in it.

    Raises:
        InvalidArgumentError: `name` is not the name of a note.
    """
    folder, _, file = name.partition("/")
    if any(part in (".", "..") or not _NOTE_PART.match(part) for part in (folder, file)):
        raise InvalidArgumentError(f"note {name!r:.120}: expected a folder and a name in it")
    return folder, file
