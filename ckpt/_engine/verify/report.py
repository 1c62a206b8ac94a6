"""`VerifyReport`, the result of `verify()`, and the files that it reads and their roles. Pure."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from ckpt._arguments import as_int, invalid, number_of_seconds
from ckpt._format.manifest import ItemEntry
from ckpt._format.step_files import SUCCESS
from ckpt._tree.table import format_bytes
from ckpt.errors import InvalidArgumentError

_SHOWN_UNLISTED = 5


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a step.

    Attributes:
        file: The file, relative to the step; `ckpt.json` for a fault of the manifest itself, `.` if
            the step's directory cannot be read.
        item: The item that the file belongs to; None if it belongs to the step as a whole.
        leaf: Leaf path of the array that is hit, as in `metadata().leaves`; None if no array is.
        message: Description of the problem and its consequence.
    """

    file: str
    item: str | None
    leaf: str | None
    message: str

    def __str__(self) -> str:
        item = "" if self.item is None else f" item {_plain(self.item)!r:.200},"
        leaf = "" if self.leaf is None else f" leaf {self.leaf!r:.1000},"
        where = f"{item}{leaf}".rstrip(",")
        return f"{_plain(self.file):.1000}:{where}{':' if where else ''} {self.message}"


@dataclass(frozen=True, slots=True, repr=False)
class VerifyReport:
    """The result of a check of a step: its scope, and the problems. It is true without problems.

    Its text is a summary, and one line for every problem.

    Attributes:
        path: Path or URL of the step.
        step: Number of the step; None for a one-shot checkpoint, or if the manifest cannot be read.
        deep: True if every byte was read; otherwise names, kinds and sizes were compared.
        problems: The problems, by file, and within a file by leaf.
        files: Number of files that were compared with the manifest, the manifest included.
        nbytes: Bytes that were read and compared with digests.
        seconds: Duration of the check in seconds.
        unlisted: Files of the step that the manifest does not list; not a problem in itself.
        first_digests: Number of arrays of a virtual step that had no digests, and have them from
            now on.
        without_digests: Number of arrays that still have none, so that a changed byte in them is
            not noticed.
        unread_files: Number of files that were not read, because of `sample=` or `timeout=`; their
            names, kinds and sizes were compared.
        unread_nbytes: Bytes of the files that were not read.

    Example:
        ```python
        report = await mgr.verify(100)
        for problem in report.problems:
            print(problem.file, problem.leaf, problem.message)
        ```
    """

    path: str
    step: int | None
    deep: bool
    problems: tuple[Problem, ...]
    files: int
    nbytes: int
    seconds: float
    unlisted: tuple[str, ...] = field(default=(), repr=False)
    first_digests: int = 0
    without_digests: int = 0
    unread_files: int = 0
    unread_nbytes: int = 0

    @property
    def ok(self) -> bool:
        """True if nothing is wrong; after `sample=` or `timeout=`, in the part that was read."""
        return not self.problems

    @property
    def is_partial(self) -> bool:
        """True if files were not read, because of `sample=` or `timeout=`."""
        return self.unread_files > 0

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def __repr__(self) -> str:
        return str(self)

    def _lines(self) -> Iterator[str]:
        read = f"{format_bytes(self.nbytes)} read" if self.deep else "names and sizes only"
        files = _count(self.files, "file")
        if self.is_partial:
            whole = format_bytes(self.nbytes + self.unread_nbytes)
            read = f"{format_bytes(self.nbytes)} of {whole} read"
            files = f"{self.files - self.unread_files} of {files}"
        what = f"{files}, {read}, {self.seconds:.2f} s"
        if self.ok and self.is_partial:
            yield f"{_plain(self.path)}: nothing is wrong in the part that was read ({what})"
        elif self.ok:
            yield f"{_plain(self.path)} is whole ({what})"
        else:
            hit = len({problem.file for problem in self.problems})
            wrong = f"{_count(len(self.problems), 'problem')} in {_count(hit, 'file')}"
            yield f"{_plain(self.path)} is damaged: {wrong} ({what})"
            yield from (f"  {problem}" for problem in self.problems)
        if self.first_digests:
            arrays = _count(self.first_digests, "array")
            yield f"  {arrays} had no digests yet; from now on a changed byte is noticed"
        if self.without_digests:
            arrays = _count(self.without_digests, "array")
            yield f"  no digests yet: {arrays}. A deep verify that may write notes them"
        if self.unlisted:
            shown = ", ".join(f"{_plain(name):.200}" for name in self.unlisted[:_SHOWN_UNLISTED])
            more = ", ..." if len(self.unlisted) > _SHOWN_UNLISTED else ""
            yield f"  not of this step: {_count(len(self.unlisted), 'file')}: {shown}{more}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _plain(text: str) -> str:
    """Return a text from a file or a directory as one printable line."""
    return text if text.isprintable() else repr(text)


class ReadLimits(Struct, frozen=True):
    """The limits of a read.

    Attributes:
        sample: The share of the files and of their bytes, from 0 to 1.
        seed: Seed of a repeatable choice; None for another choice each time.
        ends_at: Time after which no more files are begun, by `time.monotonic`; None for no limit.
    """

    sample: float = 1.0
    seed: int | None = None
    ends_at: float | None = None

    @property
    def are_set(self) -> bool:
        """True if a file may be left out."""
        return self.sample < 1 or self.ends_at is not None


NO_LIMITS = ReadLimits()


def read_limits(
    deep: bool, sample: float | None, seed: int | None, timeout: float | None
) -> ReadLimits:
    """Return the limits that the arguments of `verify` mean; the time begins now.

    Raises:
        InvalidArgumentError: An argument is invalid, or nothing would be read.
    """
    given: object = sample
    if given is not None and (
        isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given <= 1
    ):
        raise invalid("sample", sample, "the share of the files to read, above 0 and up to 1")
    if seed is not None and as_int(seed) is None:
        raise invalid("seed", seed, "a whole number")
    if timeout is not None:
        timeout = number_of_seconds("timeout", timeout, zero=True)
    if not deep and (sample is not None or timeout is not None):
        raise InvalidArgumentError(
            "sample= and timeout= say how much is read, and with deep=False nothing is. Leave "
            "them out"
        )
    ends_at = None if timeout is None else time.monotonic() + timeout
    return ReadLimits(1.0 if sample is None else float(sample), as_int(seed), ends_at)


class FileSelection:
    """The files of one step that are to be read.

    With limits they are read in random order, so that the omitted files differ from call to call.

    Attributes:
        nbytes: Bytes of the files to read.
        order: Place of each file to read in the order of reading.
        left_out: Size of each file that the limits leave out.
    """

    def __init__(self, sizes: Mapping[str, int], limits: ReadLimits, step: str) -> None:
        """Choose files.

        Args:
            sizes: The size in bytes of every file.
            limits: The limits of the read.
            step: Second input of the choice beside the seed, so that it differs between steps.
        """
        self._sizes = sizes
        self._ends_at = limits.ends_at
        # The largest first, so that no lane is busy with a large one when the others have ended.
        chosen = sorted(sizes, key=lambda path: sizes[path], reverse=True)
        if limits.are_set:
            # The choice is no secret, and has to be repeatable.
            choice = random.Random(None if limits.seed is None else f"{limits.seed} {step}")
            chosen = sorted(sizes)
            choice.shuffle(chosen)
            chosen = chosen[: self._count(chosen, limits.sample)]
        self.order = {path: place for place, path in enumerate(chosen)}
        self.nbytes = sum(sizes[path] for path in chosen)
        self.left_out = {path: size for path, size in sizes.items() if path not in self.order}
        self._begun: set[str] = set()

    def _count(self, shuffled: list[str], share: float) -> int:
        """Return the number of files that make up a share, both of all files and of their bytes."""
        wanted = share * sum(self._sizes.values())
        count = nbytes = 0
        while count < len(shuffled) and (count < share * len(shuffled) or nbytes < wanted):
            nbytes += self._sizes[shuffled[count]]
            count += 1
        return count

    def begins(self, path: str) -> bool:
        """Return True if a file is to be read now; then it counts as read."""
        if path in self._begun:
            return True
        if path not in self.order:
            return False
        if self._ends_at is not None and time.monotonic() >= self._ends_at:
            self.left_out[path] = self._sizes[path]
            return False
        self._begun.add(path)
        return True


# The files of an item that only Orbax reads; see docs/reference/format.md.
_VIEW = frozenset({"_METADATA", "_sharding", "_strings.json", "array_metadatas/process_0"})
_DATABASE = "manifest.ocdbt"


def role_of(item: ItemEntry, path: str) -> str:
    """Return the role of the file `path` of an item: `data`, `database`, `view` or `handler`."""
    if path in item.data_files:
        return "data"
    if path == _DATABASE or (item.leaves and path.startswith("d/")):
        return "database"
    is_tree = bool(item.nodes or item.leaves)
    # In an item that is not a tree such a file is for Orbax, unless the handler reads it. Steps in
    # object stores have the mark in every item.
    described = path == SUCCESS or (path == "metadata" and item.handler != "json")
    return "view" if (is_tree and path in _VIEW) or described else "handler"
