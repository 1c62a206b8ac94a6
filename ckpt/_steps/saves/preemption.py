"""`Preemption`: the notice that this run is to end soon, and the last step that follows from it.

Where `jax.distributed` is initialised, JAX's preemption service takes SIGTERM and lets all
processes agree on a step. Elsewhere a handler of our own notes the signals that were asked for.

Handlers make a chain through what each of them replaced, and the table of the operating system is
its only head. So several managers notice the same signal and may close in any order: one that was
closed stays in the chain, if others stand on it, and passes everything on.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import jax

from ckpt._arguments import invalid
from ckpt.errors import InvalidArgumentError

_Handler = Callable[[int, FrameType | None], Any] | int | None

# They cannot be handled, or come from the program's own faults: to go on after those is a loop.
_NO_NOTICES = {
    signal.SIGKILL,
    signal.SIGSTOP,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSEGV,
}


class Preemption:
    """Notices preemption signals and says at which step the run ends.

    `reached` may be called from any thread; `open` in the main thread only.
    """

    def __init__(self, signals: Iterable[int] = ()) -> None:
        """Make it; no handler is installed yet.

        Args:
            signals: The signals that announce the end, such as `(signal.SIGTERM,)`.

        Raises:
            InvalidArgumentError: They are no signals, or cannot be handled.
        """
        self._signals = _check_signals(signals)
        self._notices: list[_Notice] = []
        self._closed = False
        self._agreed_at: float | None = None
        self._preempted = False
        self._denied: int | None = None
        # Reentrant: a handler of the program's own may ask while the main thread asks.
        self._guard = threading.RLock()
        # Dropped without being closed: there is no listener left, so signals must pass through.
        weakref.finalize(self, _retire, self._notices).atexit = False

    @property
    def signals(self) -> tuple[int, ...]:
        """The signals that announce the end."""
        return self._signals

    def open(self) -> None:
        """Install the handlers; only the first call does.

        SIGTERM is left to JAX where its preemption service listens.

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
                f"preemption_signals, {', '.join(map(_name, wanted))}: Python lets only the main "
                "thread install signal handlers, and this is "
                f"{threading.current_thread().name!r}; enter the manager in the main thread, or "
                "leave preemption_signals out"
            )
        notices = [_Notice(number, _live(signal.getsignal(number))) for number in wanted]
        for notice in notices:
            if notice.previous is None:
                raise InvalidArgumentError(
                    f"preemption_signals: {_name(notice.number)} has a handler that was not "
                    "installed from Python, which could not be put back; choose another signal"
                )
        for notice in notices:
            signal.signal(notice.number, notice)
            self._notices.append(notice)

    def close(self) -> None:
        """Put back the handlers that were there before. Idempotent.

        Handlers that others installed meanwhile stay. In another thread than the main one ours
        stays, too, and passes every signal on.
        """
        self._closed = True
        _retire(self._notices)
        if threading.current_thread() is threading.main_thread():
            for notice in self._notices:
                notice.put_back()

    def reached(self, step: int) -> bool:
        """Return whether the run is to end at `step`, which has been trained and may be saved.

        Every answer is kept: the same step asked again has the same one, also if a signal came in
        between. After the first step that is preempted, all others are. With `jax.distributed`
        every process has to ask for every step; the step is then the same on all of them.

        It does not wait, with one exception: between the notice and the agreement JAX holds this
        process until the others have answered, which takes milliseconds while they are alive.

        Raises:
            InvalidArgumentError: As `open`, which this calls if it was not called before.
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
        """When the first signal came, in seconds of `time.monotonic`; None before.

        JAX does not say when it did: the time is then that of the agreed step.
        """
        times = (self._agreed_at, *(notice.at for notice in self._notices))
        return min((at for at in times if at is not None), default=None)

    def _ask(self, step: int) -> bool:
        self.open()
        if not jax.distributed.is_initialized():
            return self.noticed_at is not None
        if not _jax_listens():
            return False
        # Where nothing is distributed it is not needed.
        from jax.experimental import multihost_utils

        try:
            agreed = multihost_utils.reached_preemption_sync_point(step)
        except RuntimeError as error:
            raise _service_is_off() from error
        if agreed:
            self._agreed_at = time.monotonic()
        return agreed


class _Notice:
    """The handler of one signal; the first one it notes, the next ones it passes on."""

    def __init__(self, number: int, previous: _Handler) -> None:
        self.number = number
        self.previous = previous
        self.at: float | None = None
        self.closed = False
        # Children that were forked (a data loader's workers) have to die of the signal.
        self._pid = os.getpid()

    @property
    def is_live(self) -> bool:
        return not self.closed and os.getpid() == self._pid

    def put_back(self) -> None:
        # Python does not know that JAX, initialised since, has replaced the handler.
        is_jax = self.number == signal.SIGTERM and _jax_listens()
        is_ours = signal.getsignal(self.number) is self
        if is_ours and not is_jax:
            signal.signal(self.number, _live(self))

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # Runs between any two steps of the main thread: it takes no lock and writes no log.
        previous = _live(self.previous)
        if self.at is not None or not self.is_live:
            _pass_on(previous, number, frame)
            return
        self.at = time.monotonic()
        if isinstance(previous, _Notice):
            previous(number, frame)
        elif number != signal.SIGTERM and _jax_listens():
            # So JAX tells all processes, though only one of them got this signal.
            signal.raise_signal(signal.SIGTERM)


def _live(handler: _Handler) -> _Handler:
    """Return the first handler of a chain that is not one of ours that has ended."""
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
        # Not every default ends the process.
        signal.signal(number, current)


def _retire(notices: list[_Notice]) -> None:
    for notice in notices:
        notice.closed = True


def _jax_listens() -> bool:
    """Tell whether SIGTERM goes to JAX's preemption service."""
    is_on = getattr(jax.config, "jax_enable_preemption_service", True)
    return jax.distributed.is_initialized() and bool(is_on)


def _service_is_off() -> InvalidArgumentError:
    return InvalidArgumentError(
        "preemption_signals: jax.distributed is initialised, but JAX's preemption service is off, "
        "so processes cannot agree on a step; leave jax_enable_preemption_service on"
    )


def _check_signals(signals: Iterable[int]) -> tuple[int, ...]:
    expected = "signals, such as (signal.SIGTERM,)"
    if isinstance(signals, str | bytes) or not isinstance(signals, Iterable):
        raise invalid("preemption_signals", signals, expected)
    found = tuple(signals)
    for number in found:
        if type(number) not in (int, signal.Signals) or number not in signal.valid_signals():
            raise invalid("preemption_signals", number, expected)
        if number in _NO_NOTICES:
            raise InvalidArgumentError(
                f"preemption_signals: {_name(number)} cannot announce the end of a run; expected "
                f"{expected}"
            )
    # Each signal has one handler.
    return tuple(dict.fromkeys(found))


def _name(number: int) -> str:
    # Real-time signals have none.
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
