"""`Preemption`: the notice that this run is to end soon, and the resulting last step.

If `jax.distributed` is initialised, JAX's preemption service takes SIGTERM and lets all processes
agree on a step. Otherwise a handler of our own notes the signals that the user named.

Each handler links to the handler that it replaced, and the table of the operating system is the
only head of this chain. So several managers notice the same signal and may close in any order: a
closed handler below others stays in the chain and passes every signal on.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax

from ckpt.errors import InvalidArgumentError
from ckpt.save_when._save_policies import signal_name

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
