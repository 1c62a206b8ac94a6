"""The trainer's side of its keeper: starts it, tells it things, hears what it has done."""

from __future__ import annotations

import contextlib
import logging
import os
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
    FromKeeper,
    Setup,
    ToKeeper,
    encoded,
    from_keeper,
)
from ckpt._tiers.signal_tap import SignalTap

logger = logging.getLogger("ckpt")

_PIECE = 1 << 16
# A keeper that was killed is started again this often; then there is something wrong.
_STARTS = 5


class KeeperClient:
    """A keeper, as its trainer sees it. Its methods may be called from any thread."""

    def __init__(
        self,
        setup: Setup,
        told: Callable[[FromKeeper], None],
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
        self._closed = threading.Event()

    def start(self) -> None:
        """Start the keeper, unless it runs; a failure is said once. Blocks for milliseconds."""
        with self._guard:
            if self._process is not None and self._process.poll() is None:
                return
            if self._starts:
                self._drop()
                if self._starts <= _STARTS:
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
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ckpt._tiers.keeper", *map(str, fds)],
                stdin=subprocess.DEVNULL,
                pass_fds=fds,
                # Signals to the group of the trainer, such as Ctrl-C, are not for the keeper.
                start_new_session=True,
                cwd="/",
                env=environment,
            )
        self._socket = ours
        ours.sendall(encoded(self._setup))
        for message in self._greeting():
            ours.sendall(encoded(message))
        listener = threading.Thread(
            target=self._listen, args=(ours,), name="ckpt-keeper", daemon=True
        )
        listener.start()

    @property
    def is_started(self) -> bool:
        """Whether a keeper was started."""
        return self._process is not None

    def tell(self, message: ToKeeper) -> None:
        """Tell the keeper something, if it lives."""
        with self._guard:
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.sendall(encoded(message))

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
        """End the keeper; return whether it has done what was left.

        Args:
            flush: Whether the last snapshot is to be written first. If a signal came, it is anyway.
            timeout: Seconds that it has for that.
        """
        if self._process is None:
            return False
        done = False
        if self._socket is not None:
            self.tell(Close(flush))
            done = self._closed.wait(timeout)
        with self._guard:
            if not done:
                self._process.kill()
            self._process.wait()
            self._drop()
        return done

    def _drop(self) -> None:
        if self._socket is not None:
            # The listener hears the end.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket = None

    def _listen(self, connection: socket.socket) -> None:
        rest = b""
        with connection, contextlib.suppress(OSError):
            while piece := connection.recv(_PIECE):
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    message = from_keeper(line)
                    if isinstance(message, Closed):
                        self._closed.set()
                    self._told(message)
        # Nobody waits for one that is gone.
        self._closed.set()
