"""The past of a step: the checkpoint that its run began from, and the items that it has lost."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Literal, Protocol

from msgspec import Meta, Struct

Step = Annotated[int, Meta(ge=0)]
# Note in a root that a run went back there: step numbers alone do not tell which step is newer.
WENT_BACK_NOTE = ".ckpt-run/went-back"
_Text = Annotated[str, Meta(pattern=r"^[^\x00-\x1f]{1,200}\Z")]
# Bounded as in the head of the manifest.
_Number = Annotated[int, Meta(ge=0, le=1 << 62)]
# Folder of a root to which a step is moved, so that its number can be saved anew; empty for none.
Aside = Literal["", "damaged", "unhealthy", "abandoned"]


@dataclass(frozen=True, slots=True)
class Parent:
    """The checkpoint that a run has begun from; a dataclass, as a part of the public `StepInfo`.

    Attributes:
        path: Path of the checkpoint.
        step: Its step, or None for a one-shot checkpoint.
        attempt: Id of the attempt that wrote it, which tells it from another checkpoint at that
            path.

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
    """A save of the same step that gives way to this one wherever the step is copied to.

    Attributes:
        created_ns: Time at which it began, in Unix nanoseconds.
        committed_ns: Time of its commit, in Unix nanoseconds; all copies of it have both times.
        state: Why it is moved aside; empty for a save that is replaced.
    """

    created_ns: _Number
    committed_ns: _Number
    state: Aside = ""


@dataclass(frozen=True, slots=True)
class DroppedItem:
    """An item that was taken out of a committed step, whose other items stay.

    Attributes:
        item: Name of the item.
        dropped_ns: Time at which it was taken out, in Unix nanoseconds.
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
        """Time at which it was taken out (UTC)."""
        return datetime.fromtimestamp(self.dropped_ns / 1e9, UTC)

    def __str__(self) -> str:
        when = f"{self.dropped:%Y-%m-%d %H:%M:%S} UTC"
        if self.policy is None:
            return f"deleted by hand on {when}"
        return f"dropped on {when} by {self.policy}"


class _KnownSave(Protocol):
    """One save, as a manifest or a list of steps describes it."""

    @property
    def attempt(self) -> str: ...
    @property
    def created_ns(self) -> int: ...
    @property
    def committed_ns(self) -> int: ...
    @property
    def dropped(self) -> Sequence[DroppedItem]: ...


def is_same_save(found: _KnownSave, known: _KnownSave) -> bool:
    """Return True if `found` is the save `known`, with all of its items or without some.

    A step that loses an item is published anew, as another attempt with the old times.
    """
    if found.attempt == known.attempt:
        return True
    times = (found.created_ns, found.committed_ns)
    return len(found.dropped) > len(known.dropped) and times == (
        known.created_ns,
        known.committed_ns,
    )


class _ListedSave(Protocol):
    @property
    def step(self) -> int: ...
    @property
    def created_ns(self) -> int: ...
    @property
    def left_behind(self) -> Sequence[int]: ...


def left_behind(saves: Iterable[_ListedSave]) -> set[int]:
    """Return the start times of the saves that a run went back behind: a branch that was given up.

    Each save names the saves of greater steps that were there and that its run had not gone on
    from. A step that no smaller existing step names counts by its number, as do all steps if
    nothing is known. So the smallest step is never in the result.
    """
    found, named = set(), set[int]()
    for each in sorted(saves, key=lambda save: save.step):
        if each.created_ns in named:
            found.add(each.created_ns)
        named.update(each.left_behind)
    return found


def check_dropped(dropped: Sequence[DroppedItem], items: Collection[str]) -> None:
    """Check that no item is both there and dropped, and that none is dropped twice.

    Raises:
        ValueError: An item is.
    """
    names = [each.item for each in dropped]
    twice = next((name for name in names if name in items or names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"it says of the item {twice!r:.120} in two places what became of it")
