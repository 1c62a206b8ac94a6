"""`VerifyReport`, the result of `verify()`: the checks, and the problems. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ckpt._tree.table import format_bytes

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
