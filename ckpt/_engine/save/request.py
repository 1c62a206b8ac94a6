"""Requests: what a save is asked to write, at once or call by call."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio
from msgspec import Struct, field

from ckpt._format.history import DroppedItem, Parent, ReplacedSave
from ckpt._format.manifest import JsonValue


class SaveRequest(Struct, frozen=True):
    """What to save and under which name.

    Attributes:
        step_dir: Name of the step directory it becomes.
        step: The step, or None for a one-shot checkpoint.
        items: The objects by item name. Emptied when staging begins: the caller's arrays must not
            be kept alive while they are written.
        unnamed: Whether the caller gave one object without a name.
        metrics: User metrics.
        metadata: User metadata.
        overwrite: Whether an existing step directory is replaced.
        deadline: Seconds after its call at which the save is given up; None never does.
        parent: The checkpoint that the run has begun from, or None.
        replaces: As of `Manifest`.
        left_behind: As of `Manifest`.
        times_ns: Of the copy of another step, when its save began and when it was committed, in
            Unix nanoseconds; None for the times of this save.
        dropped: Items that the other step does not have any more.
    """

    step_dir: str
    step: int | None
    items: dict[str, Any]
    unnamed: bool
    metrics: Mapping[str, Any] | None
    metadata: JsonValue
    overwrite: bool
    deadline: float | None = None
    parent: Parent | None = None
    replaces: Sequence[ReplacedSave] = ()
    left_behind: Sequence[int] = ()
    times_ns: tuple[int, int] | None = None
    dropped: Sequence[DroppedItem] = ()


def _do_nothing() -> None:
    pass


class SaveCall(Struct, eq=False):
    """What one call saves, and how far that is; an ordinary save is a single call.

    Attributes:
        items: The objects by item name. Emptied when staging begins.
        unnamed: Whether the caller gave one object without a name.
        on_safe: Called once the caller may change or donate everything it passed.
        on_staged: Called once no more staging memory is needed.
        began: When the call was made, by `time.perf_counter`.
        returned: Set when the caller no longer waits for it.
        pressed: Set when something waits for memory, or for an item to be durable: work for the
            cores is put off no longer.
        stagings: What still stages: the handlers' calls, as one, and what goes on after they
            have returned.
    """

    items: dict[str, Any]
    unnamed: bool
    on_safe: Callable[[], None] = _do_nothing
    on_staged: Callable[[], None] = _do_nothing
    began: float = field(default_factory=time.perf_counter)
    returned: anyio.Event = field(default_factory=anyio.Event)
    pressed: anyio.Event = field(default_factory=anyio.Event)
    stagings: int = 1


class SaveCalls:
    """The calls of one save, in their order. Used on the engine's loop."""

    def __init__(self, *, in_parts: bool = False) -> None:
        """Take calls that are added until `finish`.

        Args:
            in_parts: Whether an item may arrive in several parts.
        """
        self.in_parts = in_parts
        self._queue: deque[SaveCall] = deque()
        self._changed = anyio.Event()
        self._finished = False

    @classmethod
    def of(cls, call: SaveCall) -> SaveCalls:
        """Return the single call of an ordinary save."""
        calls = cls()
        calls.add(call)
        calls.finish()
        return calls

    def add(self, call: SaveCall) -> None:
        """Take one more call."""
        self._queue.append(call)
        self._changed.set()

    def finish(self) -> None:
        """Say that there will be no more."""
        self._finished = True
        self._changed.set()

    def drop(self) -> None:
        """Forget the calls that will not be saved any more, and with them the callers' objects."""
        self._queue.clear()

    async def next(self) -> SaveCall | None:
        """Return the next call, waiting until there is one; None after the last."""
        while not self._queue:
            if self._finished:
                return None
            self._changed = anyio.Event()
            await self._changed.wait()
        return self._queue.popleft()
