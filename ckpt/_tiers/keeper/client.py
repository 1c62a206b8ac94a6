"""The trainer's side of its keeper: starts it, tells it things, hears what it has done."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import ckpt
from ckpt._tiers.keeper.messages import (
    Close,
    Closed,
    Closing,
    Gone,
    Setup,
    ToKeeper,
    Told,
    encoded,
    from_keeper,
)
from ckpt._tiers.keeper.priority import give_way
from ckpt._tiers.signal_tap import SignalTap

logger = logging.getLogger("ckpt")

_PIECE = 1 << 16
# For the first answer of one that is to end, on a machine that has much else to do.
_ANSWER_SECONDS = 30.0
# A keeper that was killed is started again this often; then there is something wrong.
_STARTS = 5


class _Ending:
    """How one keeper ends, as its listener hears it."""

    def __init__(self) -> None:
        # Set at the answer to `Close`, and when all is done; both where the keeper is gone.
        self.has_begun = threading.Event()
        self.is_over = threading.Event()
        # Whether it has said that it writes a snapshot first, and that all is done.
        self.writes = False
        self.is_done = False


class KeeperClient:
    """A keeper, as its trainer sees it. Its methods may be called from any thread."""

    def __init__(
        self,
        setup: Setup,
        told: Callable[[Told], None],
        greeting: Callable[[], Sequence[ToKeeper]],
    ) -> None:
        """Start nothing yet.

        Args:
            setup: What the keeper is to do.
            told: Hears what it says, in a thread of its own.
            greeting: Returns what each keeper is told first.
        """
        self._setup = setup
        self._told = told
        self._greeting = greeting
        self._guard = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        # With the first keeper.
        self._tap: SignalTap | None = None
        self._starts = 0
        self._ending = _Ending()
        self._ending.has_begun.set()
        self._ending.is_over.set()

    def start(self) -> None:
        """Start the keeper, unless it runs; a failure is said once. Blocks for milliseconds."""
        with self._guard:
            if self._process is not None and self._process.poll() is None:
                return
            self._drop()
            ending = self._ending
        # What the one before has said is heard first: its end is not that of the next one.
        ending.is_over.wait(_ANSWER_SECONDS)
        with self._guard:
            if self._process is not None and self._process.poll() is None:
                return
            if 0 < self._starts <= _STARTS:
                logger.warning(
                    "the process that copies steps behind this one was killed; it is %s",
                    "started again" if self._starts < _STARTS else "not started any more",
                )
            if self._starts >= _STARTS:
                self._starts += 1
                return
            self._starts += 1
            try:
                self._start()
            except OSError as error:
                logger.warning(
                    "the process that copies steps behind this one could not be started, so that "
                    "snapshots and the steps of tiers stay on this host: %s",
                    error,
                )
                self._starts = _STARTS + 1

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        tap = self._tap = self._tap or SignalTap()
        with theirs:
            environment = dict(os.environ)
            # Wherever this package was imported from.
            places = [str(Path(ckpt.__file__).parents[1]), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
            fds = [theirs.fileno(), tap.heard.fileno()]
            # What a scheduler tells all processes of a job waits until the keeper can hear it.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "ckpt._tiers.keeper", *map(str, fds)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=fds,
                    # Signals to the group of the trainer, such as Ctrl-C, are not for the keeper.
                    start_new_session=True,
                    cwd="/",
                    env=environment,
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # At once: what it imports costs the most.
        give_way(self._process.pid)
        self._socket = ours
        ours.sendall(encoded(self._setup))
        for message in self._greeting():
            ours.sendall(encoded(message))
        ending = self._ending = _Ending()
        listener = threading.Thread(
            target=self._listen, args=(ours, ending), name="ckpt-keeper", daemon=True
        )
        listener.start()

    @property
    def is_started(self) -> bool:
        """Whether a keeper was started."""
        return self._process is not None

    def tell(self, message: ToKeeper) -> None:
        """Tell the keeper something, if it lives.

        Does not wait: a keeper that has not listened for hundreds of messages is ended, so that the
        next step starts another.
        """
        with self._guard:
            if self._socket is None or self._process is None:
                return
            line = encoded(message)
            try:
                sent = self._socket.send(line, socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
            except OSError:
                # It is gone.
                return
            if sent < len(line):
                self._process.kill()

    def end(self) -> None:
        """End a keeper that does not answer, so that the next step starts another."""
        with self._guard:
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def leave(self) -> None:
        """Leave the keeper to itself: it goes on as if this process had died."""
        with self._guard:
            self._drop()

    def tap_signals(self) -> None:
        """Let the keeper hear of signals at once; does so in the main thread only."""
        if self._tap is not None:
            self._tap.install()

    def untap_signals(self) -> None:
        """Put back what heard of signals before."""
        if self._tap is not None:
            self._tap.remove()
            self._tap = None

    def close(self, *, flush: bool, timeout: float) -> bool:
        """End the keeper; return whether all is written that was to be.

        Args:
            flush: Whether the last snapshot is to be written first. If a signal came, it is anyway.
            timeout: Seconds that it has for that.
        """
        if flush:
            # It may have been killed since the last snapshot.
            self.start()
        if self._process is None:
            return not flush
        ending = self._ending
        if self._socket is not None:
            self.tell(Close(flush))
            # One that is stopped never answers; one that does may have much to write.
            if ending.has_begun.wait(_ANSWER_SECONDS):
                ending.is_over.wait(timeout)
        with self._guard:
            if not ending.is_done:
                self._process.kill()
            self._process.wait()
            self._drop()
        return ending.is_done or not (flush or ending.writes)

    def _drop(self) -> None:
        if self._socket is not None:
            # The listener hears the end.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket = None

    def _listen(self, connection: socket.socket, ending: _Ending) -> None:
        rest = b""
        with connection, contextlib.suppress(OSError):
            while piece := connection.recv(_PIECE):
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    message = from_keeper(line)
                    # Before anything that waits for the end goes on.
                    self._told(message)
                    if isinstance(message, Closing):
                        ending.writes = message.writes
                        ending.has_begun.set()
                    elif isinstance(message, Closed):
                        ending.is_done = True
                        ending.is_over.set()
        # One that is gone says nothing more.
        self._told(Gone())
        ending.has_begun.set()
        ending.is_over.set()
