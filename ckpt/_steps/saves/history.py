"""What save policies are told: the saves so far, their overhead, and signals that end the run.

Cost of saving for the training beside it, measured from outside; pure: times are arguments. The
manager does not see training steps. It sees the calls of `save` and `should_save`, which name a
step, and the saves that were under way between these calls.

`Preemption`: the notice that this run is to end soon, and the resulting last step. If
`jax.distributed` is initialised, JAX's preemption service takes SIGTERM and lets all processes
agree on a step. Otherwise a handler of our own notes the signals that the user named.

Each handler links to the handler that it replaced, and the table of the operating system is the
only head of this chain. So several managers notice the same signal and may close in any order: a
closed handler below others stays in the chain and passes every signal on.
"""

from __future__ import annotations

import logging
import os
import signal
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from types import FrameType
from typing import Any

import jax
from msgspec import Struct

from ckpt._arguments import check_step
from ckpt._format.manifest import Manifest
from ckpt._steps.root import Root
from ckpt._steps.saves.commits import SaveRun
from ckpt.errors import CheckpointError, InvalidArgumentError
from ckpt.keep._questions import SavedStep
from ckpt.save_when._save_policies import SaveContext, signal_name

logger = logging.getLogger("ckpt")
_SAVES = 5
_STEPS = 50


class _Save(Struct):
    """A save, and the time and the steps that passed while it was under way.

    Attributes:
        began: Time of the call.
        ended: Time of the commit; None while it is under way, and after a failure.
        blocked: Duration of the call.
        passed: Seconds between asks while it was under way; shared with others under way then.
        steps: Training steps in this time, shared likewise.
    """

    began: float
    ended: float | None = None
    blocked: float = 0.0
    passed: float = 0.0
    steps: float = 0.0


class OverheadEstimate:
    """Medians over the last few training steps and saves; None while there are none.

    All times are in seconds of one monotonic clock. Not thread-safe.
    """

    def __init__(self) -> None:
        self._asked: tuple[int, float] | None = None
        self._under_way: dict[Hashable, _Save] = {}
        # Saves that have ended since the last ask: they slowed down a part of the time until the
        # next ask.
        self._just_ended: list[_Save] = []
        self._saves: deque[_Save] = deque(maxlen=_SAVES)
        self._step_seconds: deque[float] = deque(maxlen=_STEPS)

    def asked(self, step: int, at: float) -> None:
        """Note that the manager was asked about a step; the first ask about a step counts."""
        before, self._asked = self._asked, (step, at)
        if before is None or step < before[0]:
            # The run went back: the time since the last ask was not spent on steps.
            self._just_ended.clear()
            return
        if step == before[0]:
            self._asked = before
            return
        steps, passed = step - before[0], at - before[1]
        beside = [*self._just_ended, *self._under_way.values()]
        self._just_ended.clear()
        if not beside:
            self._step_seconds.append(passed / steps)
        for save in beside:
            save.passed += passed / len(beside)
            save.steps += steps / len(beside)

    def begin_save(self, key: Hashable, at: float) -> None:
        """Note the call of a save; `key` is any value that identifies it."""
        self._under_way[key] = _Save(at)

    def end_save(self, key: Hashable, at: float, blocked: float | None) -> None:
        """Note the end of a save.

        Args:
            key: The key from `begin_save`; unknown keys are ignored.
            at: Time of the commit.
            blocked: Duration of the call; None for a failed save, which is not counted.
        """
        save = self._under_way.pop(key, None)
        if save is None:
            return
        self._just_ended.append(save)
        if blocked is not None:
            save.ended, save.blocked = at, blocked
            self._saves.append(save)

    @property
    def step_seconds(self) -> float | None:
        """Time of one training step while nothing is saved."""
        return statistics.median(self._step_seconds) if self._step_seconds else None

    @property
    def save_seconds(self) -> float | None:
        """Time from the call of a save to its commit."""
        return statistics.median(map(_duration, self._saves)) if self._saves else None

    @property
    def lost_seconds(self) -> float | None:
        """Training time that one save takes.

        This is the extra time of the steps beside the save, at least the duration of its call and
        at most that of the whole save. If no two asks came without a save in between, there is no
        step time to compare with, and only the call counts.
        """
        if not self._saves:
            return None
        step_seconds = self.step_seconds
        return statistics.median(_lost(save, step_seconds) for save in self._saves)


def _duration(save: _Save) -> float:
    assert save.ended is not None
    return max(save.ended - save.began, save.blocked)


def _lost(save: _Save, step_seconds: float | None) -> float:
    if step_seconds is None:
        return save.blocked
    slower = save.passed - save.steps * step_seconds
    return min(max(slower, save.blocked), _duration(save))


_Handler = Callable[[int, FrameType | None], Any] | int | None


class Preemption:
    """Notes preemption signals, and answers at which step the run ends.

    `reached` may be called from any thread; `open` in the main thread only.
    """

    def __init__(self, signals: tuple[int, ...] = ()) -> None:
        """Make it without installing handlers; `signals` announce the end."""
        self._signals = signals
        self._notices: list[_Notice] = []
        self._closed = False
        self._agreed_at: float | None = None
        self._preempted = False
        self._denied: int | None = None
        # Reentrant: a signal handler of the program may call `reached` while the main thread is
        # in it.
        self._guard = threading.RLock()
        # If this object is dropped without being closed, nobody listens: signals must pass through.
        weakref.finalize(self, _retire, self._notices).atexit = False

    @property
    def signals(self) -> tuple[int, ...]:
        return self._signals

    def open(self) -> None:
        """Install the handlers; further calls do nothing.

        SIGTERM is left to JAX if its preemption service listens.

        Raises:
            InvalidArgumentError: This is not the main thread; or a signal is handled outside
                Python; or there are several processes and JAX's preemption service is off.
        """
        if self._closed or not self._signals:
            return
        if jax.distributed.is_initialized() and not _jax_listens():
            raise _service_is_off()
        if self._notices:
            return
        wanted = [n for n in self._signals if not (n == signal.SIGTERM and _jax_listens())]
        if wanted and threading.current_thread() is not threading.main_thread():
            raise InvalidArgumentError(
                f"save_when.Preempted, {', '.join(map(signal_name, wanted))}: Python lets only the "
                "main thread install signal handlers, and this is "
                f"{threading.current_thread().name!r}; enter the manager in the main thread, or "
                "leave Preempted out"
            )
        notices = [_Notice(number, _live(signal.getsignal(number))) for number in wanted]
        for notice in notices:
            if notice.previous is None:
                raise InvalidArgumentError(
                    f"save_when.Preempted: {signal_name(notice.number)} has a handler that was not "
                    "installed from Python, which could not be put back; choose another signal"
                )
        for notice in notices:
            signal.signal(notice.number, notice)
            self._notices.append(notice)

    def close(self) -> None:
        """Put back the handlers that were there before. Idempotent.

        Handlers that others have installed since then stay. Outside the main thread our handlers
        stay, too, and pass every signal on.
        """
        self._closed = True
        _retire(self._notices)
        if threading.current_thread() is threading.main_thread():
            for notice in self._notices:
                notice.put_back()

    def reached(self, step: int) -> bool:
        """Return True if the run is to end at `step`, which has been trained and may be saved.

        Every answer is kept: asked again about the same step, it answers the same, even if a signal
        came in between. After the first preempted step, all others are preempted. With
        `jax.distributed` every process must ask about every step; the step is then the same on all.

        The call does not wait, with one exception: between the notice and the agreement JAX holds
        this process until the others have answered, which takes milliseconds while they are alive.

        Raises:
            InvalidArgumentError: As for `open`, which this calls if it was not called before.
        """
        with self._guard:
            if step == self._denied:
                return False
            if not self._preempted:
                self._preempted = self._ask(step)
            if not self._preempted:
                self._denied = step
            return self._preempted

    @property
    def noticed_at(self) -> float | None:
        """Time of the first signal, in seconds of `time.monotonic`; None before it.

        JAX does not report the time of the signal: with JAX it is the time of the agreed step.
        """
        times = (self._agreed_at, *(notice.at for notice in self._notices))
        return min((at for at in times if at is not None), default=None)

    def _ask(self, step: int) -> bool:
        self.open()
        if not jax.distributed.is_initialized():
            return self.noticed_at is not None
        if not _jax_listens():
            return False
        # Imported here: programs without `jax.distributed` do not need it.
        from jax.experimental import multihost_utils

        try:
            agreed = multihost_utils.reached_preemption_sync_point(step)
        except RuntimeError as error:
            raise _service_is_off() from error
        if agreed:
            self._agreed_at = time.monotonic()
        return agreed


class _Notice:
    """The handler of one signal: it notes the first signal and passes on later ones."""

    def __init__(self, number: int, previous: _Handler) -> None:
        self.number = number
        self.previous = previous
        self.at: float | None = None
        self.closed = False
        # Forked children (workers of a data loader) must die of the signal.
        self._pid = os.getpid()

    @property
    def is_live(self) -> bool:
        return not self.closed and os.getpid() == self._pid

    def put_back(self) -> None:
        # If JAX was initialised since, it has replaced the handler without telling Python.
        is_jax = self.number == signal.SIGTERM and _jax_listens()
        is_ours = signal.getsignal(self.number) is self
        if is_ours and not is_jax:
            signal.signal(self.number, _live(self))

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # This runs between any two bytecodes of the main thread: it takes no lock and does not log.
        previous = _live(self.previous)
        if self.at is not None or not self.is_live:
            _pass_on(previous, number, frame)
            return
        self.at = time.monotonic()
        if isinstance(previous, _Notice):
            previous(number, frame)
        elif number != signal.SIGTERM and _jax_listens():
            # JAX then tells all processes, although only this one got the signal.
            signal.raise_signal(signal.SIGTERM)


def _live(handler: _Handler) -> _Handler:
    """Return the first handler of a chain that is not one of our ended ones."""
    while isinstance(handler, _Notice) and not handler.is_live:
        handler = handler.previous
    return handler


def _pass_on(handler: _Handler, number: int, frame: FrameType | None) -> None:
    if callable(handler):
        handler(number, frame)
    elif handler == signal.SIG_DFL:
        current = signal.getsignal(number)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
        # A default action may not end the process: put the handler back.
        signal.signal(number, current)


def _retire(notices: list[_Notice]) -> None:
    for notice in notices:
        notice.closed = True


def _jax_listens() -> bool:
    """Return True if SIGTERM goes to JAX's preemption service."""
    is_on = getattr(jax.config, "jax_enable_preemption_service", True)
    return jax.distributed.is_initialized() and bool(is_on)


def _service_is_off() -> InvalidArgumentError:
    return InvalidArgumentError(
        "save_when.Preempted: jax.distributed is initialised, but JAX's preemption service is off, "
        "so processes cannot agree on a step; leave jax_enable_preemption_service on"
    )


class SaveHistory:
    """The saves of one root over time. Used on the engine's loop."""

    def __init__(self, now_ns: Callable[[], int], preemption: Preemption) -> None:
        """Make an empty history; `now_ns` returns Unix nanoseconds."""
        self._now_ns = now_ns
        self._preemption = preemption
        self._pace = OverheadEstimate()
        self._saving: dict[SaveRun, SavedStep] = {}
        self._first_time: float | None = None
        self._last_time: float | None = None
        # The save at preemption, unless it has failed.
        self._final: SaveRun | None = None

    def context(self, step: int) -> SaveContext:
        """Return the context in which a policy decides about saving `step`."""
        self._pace.asked(step, time.perf_counter())
        now = self._now_ns() / 1e9
        if self._first_time is None:
            self._first_time = now
        saving = tuple(self._saving.values())
        times = [each.time for each in saving]
        return SaveContext(
            now=now,
            preempted=self._preemption.reached(step) and self._final is None,
            saving=saving,
            last_time=times[-1] if times else self._last_time,
            step_seconds=self._pace.step_seconds,
            lost_seconds=self._pace.lost_seconds,
            save_seconds=self._pace.save_seconds,
        )

    async def kept_by(self, context: SaveContext, root: Root) -> float:
        """Return the training time that a final save keeps, in seconds."""
        try:
            newest = await root.index.latest() if context.last_time is None else None
        except CheckpointError as error:
            # The value is for a report only.
            logger.debug("the newest step could not be looked at: %s", error)
            newest = None
        # Counted from the start of the save before this one, by any manager, or else of the run.
        last = context.last_time if newest is None else newest.created_ns / 1e9
        last = self._first_time if last is None else last
        return 0.0 if last is None else max(context.now - last, 0.0)

    def begin(self, save: SaveRun, context: SaveContext) -> None:
        """Note that a save has joined the backlog."""
        if self._last_time is not None and self._last_time > context.now:
            # The clock was set back. Count intervals from this save: counted from the time before,
            # every step would be saved until the clock reaches that time again.
            self._last_time = None
        self._saving[save] = SavedStep(check_step(save.step), context.now)
        self._pace.begin_save(save, time.perf_counter())
        if context.preempted:
            self._final = save

    def end(self, save: SaveRun, blocked: float | None) -> None:
        """Note that a save has ended; `blocked` are the seconds of its call, None if it failed."""
        del self._saving[save]
        self._pace.end_save(save, time.perf_counter(), blocked)
        if save is self._final and blocked is None:
            self._final = None

    def committed(self, manifest: Manifest) -> None:
        # A save in parts may have begun before other saves that have already ended.
        self._last_time = max(manifest.created_ns / 1e9, self._last_time or 0.0)
