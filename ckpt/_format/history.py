"""What a step says of the past: where its run has begun, and which items it had once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Literal, Protocol

from msgspec import Meta, Struct

Step = Annotated[int, Meta(ge=0)]
# Says of a root that a run went back in it, so that numbers alone do not tell what is newer.
WENT_BACK_NOTE = ".ckpt-run/went-back"
_Text = Annotated[str, Meta(pattern=r"^[^\x00-\x1f]{1,200}\Z")]
# Bounded as in the head of the manifest.
_Number = Annotated[int, Meta(ge=0, le=1 << 62)]


@dataclass(frozen=True, slots=True)
class Parent:
    """The checkpoint that a run has begun from; a dataclass, as a part of the public `StepInfo`.

    Attributes:
        path: Where it was.
        step: Its step, or None for a checkpoint by itself.
        attempt: The attempt that wrote it, which tells it from another one at that path.

    Example:
        ```python
        parent = ckpt.sync.metadata("runs/a/100").info.parent
        if parent is not None:
            print(parent.path, parent.step)
        ```
    """

    path: str
    step: Step | None
    attempt: str


class ReplacedSave(Struct, frozen=True, omit_defaults=True):
    """A save of the same step that is to make way wherever the step is copied to.

    Attributes:
        created_ns: When it began, in Unix nanoseconds.
        committed_ns: When it was committed; all copies of it have both.
        state: `damaged`, `unhealthy` or `abandoned`, for what is moved aside; empty for what is
            replaced.
    """

    created_ns: _Number
    committed_ns: _Number
    state: Literal["", "damaged", "unhealthy", "abandoned"] = ""


@dataclass(frozen=True, slots=True)
class DroppedItem:
    """An item that was taken out of a committed step, whose other items stay.

    Attributes:
        item: Its name.
        dropped_ns: When that was, in Unix nanoseconds.
        policy: The policy that did not keep it, as text; None if it was deleted by hand.
        nbytes: Bytes of its files.

    Example:
        ```python
        for each in ckpt.sync.metadata("runs/a/100").info.dropped:
            print(each.item, each.dropped, each.policy or "by hand")
        ```
    """

    item: str
    dropped_ns: _Number
    policy: _Text | None = None
    nbytes: _Number = 0

    @property
    def dropped(self) -> datetime:
        """When it was dropped (UTC)."""
        return datetime.fromtimestamp(self.dropped_ns / 1e9, UTC)

    def __str__(self) -> str:
        when = f"{self.dropped:%Y-%m-%d %H:%M:%S} UTC"
        if self.policy is None:
            return f"deleted by hand on {when}"
        return f"dropped on {when} by {self.policy}"


class _KnownSave(Protocol):
    """What a manifest, or a list of steps, says of one save."""

    @property
    def attempt(self) -> str: ...
    @property
    def created_ns(self) -> int: ...
    @property
    def committed_ns(self) -> int: ...
    @property
    def dropped(self) -> Sequence[DroppedItem]: ...


def is_rest_of(found: _KnownSave, known: _KnownSave) -> bool:
    """Tell whether what is there is the save that was known, with all its items or without some.

    A step that loses an item is published anew, as another attempt with the old times.
    """
    if found.attempt == known.attempt:
        return True
    times = (found.created_ns, found.committed_ns)
    return len(found.dropped) > len(known.dropped) and times == (
        known.created_ns,
        known.committed_ns,
    )


def check_dropped(dropped: Sequence[DroppedItem], items: Collection[str]) -> None:
    """Check that items are not both there and dropped, and that none is dropped twice.

    Raises:
        ValueError: One is.
    """
    names = [each.item for each in dropped]
    twice = next((name for name in names if name in items or names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"it says of the item {twice!r:.120} in two places what became of it")
