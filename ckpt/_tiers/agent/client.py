"""The trainer's side of its agent: starts it, sends it messages, and receives its answers."""

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
from ckpt._tiers.agent.messages import (
    AgentGone,
    AgentMessage,
    AgentSetup,
    CloseRequest,
    CloseResult,
    CloseStarted,
    ToAgent,
    decode_from_agent,
    encoded,
)
from ckpt._tiers.agent.priority import lower_priority
from ckpt._tiers.signal_tap import SignalTap

logger = logging.getLogger("ckpt")

_PIECE = 1 << 16
# Time for the first answer of an agent that is to end, on a busy machine.
_ANSWER_SECONDS = 30.0
# Number of starts: an agent that is killed more often has a fault.
_STARTS = 5


class _Ending:
    """The end of one agent, as its listener observes it."""

    def __init__(self) -> None:
        # Set at the answer to `CloseRequest`, and when all is done; both are set if the agent is
        # gone.
        self.has_begun = threading.Event()
        self.is_over = threading.Event()
        # True if it has announced that it writes a snapshot first, and that all is done.
        self.writes = False
        self.is_done = False


class AgentClient:
    """An agent, as its trainer sees it. Its methods may be called from any thread."""

    def __init__(
        self,
        setup: AgentSetup,
        on_message: Callable[[AgentMessage], None],
        greeting: Callable[[], Sequence[ToAgent]],
    ) -> None:
        """Make a client without starting an agent.

        Args:
            setup: The tasks of the agent.
            on_message: Called with its messages, in a thread of its own.
            greeting: Returns the first messages to each agent.
        """
        self._setup = setup
        self._on_message = on_message
        self._greeting = greeting
        self._guard = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        # Made with the first agent.
        self._tap: SignalTap | None = None
        self._starts = 0
        self._ending = _Ending()
        self._ending.has_begun.set()
        self._ending.is_over.set()

    def start(self) -> None:
        """Start the agent unless it runs; warn once about a failure. Blocks for milliseconds."""
        with self._guard:
            if self._process is not None and self._process.poll() is None:
                return
            self._drop()
            ending = self._ending
        # First wait for the last messages of the agent before: its end is not that of the next.
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
            # The agent imports this package from the same place.
            places = [str(Path(ckpt.__file__).parents[1]), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, places))
            fds = [theirs.fileno(), tap.heard.fileno()]
            # A scheduler may send SIGTERM to all processes of a job: it waits until the agent can
            # handle it.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "ckpt._tiers.agent", *map(str, fds)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=fds,
                    # Signals to the trainer's process group, such as Ctrl-C, are not for the agent.
                    start_new_session=True,
                    cwd="/",
                    env=environment,
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # Lower it at once: the imports of the agent cost the most.
        lower_priority(self._process.pid)
        self._socket = ours
        ours.sendall(encoded(self._setup))
        for message in self._greeting():
            ours.sendall(encoded(message))
        ending = self._ending = _Ending()
        listener = threading.Thread(
            target=self._listen, args=(ours, ending), name="ckpt-agent", daemon=True
        )
        listener.start()

    @property
    def is_started(self) -> bool:
        return self._process is not None

    def tell(self, message: ToAgent) -> None:
        """Send a message to the agent, if it lives.

        Does not wait: an agent that has not read hundreds of messages is killed, so that the next
        step starts another.
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
                # The agent is gone.
                return
            if sent < len(line):
                self._process.kill()

    def end(self) -> None:
        """Kill an agent that does not answer, so that the next step starts another."""
        with self._guard:
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def leave(self) -> None:
        """Leave the agent alone: it goes on as if this process had died."""
        with self._guard:
            self._drop()

    def tap_signals(self) -> None:
        """Let the agent get signals at once; works in the main thread only."""
        if self._tap is not None:
            self._tap.install()

    def untap_signals(self) -> None:
        """Put back the wakeup descriptor from before `tap_signals`."""
        if self._tap is not None:
            self._tap.remove()
            self._tap = None

    def close(self, *, flush: bool, timeout: float) -> bool:
        """End the agent; return True if everything was written that was to be.

        Args:
            flush: True to write the last snapshot first. After a signal it is written in any case.
            timeout: Seconds for this.
        """
        if flush:
            # The agent may have been killed since the last snapshot.
            self.start()
        if self._process is None:
            return not flush
        ending = self._ending
        if self._socket is not None:
            self.tell(CloseRequest(flush))
            # A stopped agent never answers; a live one may need long to finish.
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
            # The listener sees the end of the connection.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket = None

    def _listen(self, connection: socket.socket, ending: _Ending) -> None:
        rest = b""
        with connection, contextlib.suppress(OSError):
            while piece := connection.recv(_PIECE):
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    message = decode_from_agent(line)
                    # Handle the message before the events below wake those that wait for the end.
                    self._on_message(message)
                    if isinstance(message, CloseStarted):
                        ending.writes = message.writes
                        ending.has_begun.set()
                    elif isinstance(message, CloseResult):
                        ending.is_done = True
                        ending.is_over.set()
        # The agent is gone and sends nothing more.
        self._on_message(AgentGone())
        ending.has_begun.set()
        ending.is_over.set()
