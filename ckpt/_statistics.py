"""Where the time of a save went, and how that is kept with the step."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

__all__ = [
    "SaveStatistics",
    "Stopwatch",
    "decode_late",
    "encode_late",
    "of_manifest",
]


@dataclass(frozen=True, slots=True)
class SaveStatistics:
    """Where the time of a save went, in seconds; None where that is not known.

    Attributes:
        blocked: From the call of `save` until it could return.
        waited: Waiting for earlier saves: for their snapshots before this one's, and for their
            commits before anything was written.
        staged: From the call of `save` until everything was in host memory.
        written: From the call of `save` until all data was durable.
        merged: Writing what ties the step together: views and manifest.
        published: Giving the step its name, durably.
        deleted: Deleting afterwards what is not kept any more. Not known before that has ended, so
            a commit does not tell it; `metadata` does later.
    """

    blocked: float | None = None
    waited: float | None = None
    staged: float | None = None
    written: float | None = None
    merged: float | None = None
    published: float | None = None
    deleted: float | None = None


# As in a manifest; greater numbers would be no times, and some are no floats.
_LONGEST_SECONDS = 1e12
_EARLY = ("blocked", "waited", "staged", "written")
_LATE = ("merged", "published", "deleted")


@dataclass(slots=True)
class Stopwatch:
    """Takes the times of one save while it goes on.

    Attributes:
        began: When it was called, by `time.perf_counter`.
        taken: What is known so far.
    """

    began: float = field(default_factory=time.perf_counter)
    taken: SaveStatistics = field(default_factory=SaveStatistics)

    @property
    def elapsed(self) -> float:
        """Seconds since the save was called."""
        return time.perf_counter() - self.began

    def note(self, **seconds: float) -> None:
        """Take these times, by the names of `SaveStatistics`."""
        self.taken = replace(self.taken, **seconds)

    @contextlib.contextmanager
    def taking(self, name: str) -> Iterator[None]:
        """Take the time of the body under this name."""
        began = time.perf_counter()
        yield
        self.note(**{name: time.perf_counter() - began})

    def add_wait(self, seconds: float) -> None:
        """Take a time in which the save waited for others."""
        self.note(waited=(self.taken.waited or 0.0) + seconds)

    def early(self) -> dict[str, float]:
        """Return what is known before the manifest is written, for the manifest."""
        return _known(self.taken, _EARLY)


def of_manifest(early: Mapping[str, float]) -> SaveStatistics | None:
    """Return what a manifest tells; None of a step that has no statistics."""
    known = {name: early[name] for name in _EARLY if name in early}
    return SaveStatistics(**known) if known else None


def encode_late(attempt: str, taken: SaveStatistics) -> bytes:
    """Return the content of the note for what is known only after a step is published."""
    return json.dumps({"attempt": attempt, **_known(taken, _LATE)}).encode()


def decode_late(data: bytes | None, attempt: str, early: SaveStatistics) -> SaveStatistics:
    """Return the statistics of a step with those of the note; what makes no sense is left out.

    Args:
        data: Content of the note, or None.
        attempt: The attempt that wrote the step: a note of another one was left by a step that was
            replaced.
        early: What the manifest tells.
    """
    try:
        document = json.loads(data or b"null")
    except (ValueError, RecursionError):
        return early
    if not isinstance(document, dict) or document.get("attempt") != attempt:
        return early
    numbers = {name: document[name] for name in _LATE if name in document}
    usable = {
        name: float(value)
        for name, value in numbers.items()
        if isinstance(value, int | float) and 0 <= value < _LONGEST_SECONDS
    }
    return replace(early, **usable)


def _known(taken: SaveStatistics, names: tuple[str, ...]) -> dict[str, float]:
    return {name: value for name in names if (value := getattr(taken, name)) is not None}
