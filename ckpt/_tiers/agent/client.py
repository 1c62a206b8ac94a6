"""The trainer's side of its agent: starts it, sends it messages and calls, and hears its answers.

An agent is in a session of its own, and where Linux first shares the processors among sessions
(autogroups), niceness counts only within a session. So the group gets the niceness of the agent.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import anyio

import ckpt
from ckpt._runtime.futures import settled, settled_here
from ckpt._runtime.threads import run_in_thread
from ckpt._tiers.agent.messages import (
    AgentMessage,
    AgentSetup,
    Call,
    CallProgress,
    CallResult,
    CloseRequest,
    Request,
    ToAgent,
    decode_from_agent,
    encoded,
)
from ckpt._tiers.signal_tap import SignalTap

logger = logging.getLogger("ckpt")

_PIECE = 1 << 16
# Time after which an agent that has said nothing during a call counts as stopped, on a busy
# machine: a live one says every second that it goes on. And the time between two looks at it.
ANSWER_SECONDS, _LOOK_SECONDS = 30.0, 2.0
# Number of starts: an agent that is killed more often has a fault.
_STARTS = 5
# An agent gets about a tenth of a processor that the trainer wants, too, and all of an idle one.
NICENESS = 10


class _Asked:
    """A call, until the agent has answered it or has gone.

    Attributes:
        call: The call.
        result: Its result.
        again: True if the next agent is asked, too.
        connection: The connection to the agent that was asked; None if there was none.
    """

    def __init__(self, call: Call, *, again: bool) -> None:
        self.call = call
        self.result: Future[CallResult] = Future()
        self.again = again
        self.connection: socket.socket | None = None


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
        self._listener = threading.Thread()
        self._numbers = itertools.count()
        self._calls: dict[int, _Asked] = {}
        # Time of the last message, and the reason why the last agent has gone.
        self._heard_at = 0.0
        self._fate = ""

    def start(self) -> None:
        """Start the agent unless it runs; warn once about a failure. Blocks for milliseconds."""
        with self._guard:
            if self._is_alive():
                return
            self._drop()
            if self._process is not None:
                # It may be about to die.
                self._process.kill()
                self._process.wait()
            listener = self._listener
        # First hear the last messages of the agent before.
        if listener.ident is not None:
            listener.join(ANSWER_SECONDS)
        with self._guard:
            if self._is_alive():
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
        with theirs, contextlib.ExitStack() as on_failure:
            on_failure.enter_context(ours)
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
            on_failure.pop_all()
        # Lower it at once: the imports of the agent cost the most.
        _lower_priority(self._process.pid)
        self._socket, self._heard_at, self._fate = ours, time.monotonic(), "was killed"
        calls = [each for each in self._calls.values() if each.again and each.connection is None]
        for each in calls:
            each.connection = ours
        for message in (self._setup, *self._greeting(), *(each.call for each in calls)):
            ours.sendall(encoded(message))
        self._listener = threading.Thread(
            target=self._listen, args=(ours,), name="ckpt-agent", daemon=True
        )
        self._listener.start()

    def _is_alive(self) -> bool:
        process = self._process
        return self._socket is not None and process is not None and process.poll() is None

    def tell(self, message: ToAgent) -> None:
        """Send a message to the agent, if it lives.

        Does not wait: an agent that has not read hundreds of messages is killed, so that the next
        step starts another.
        """
        with self._guard:
            self._send(message)

    def _send(self, message: ToAgent) -> bool:
        """Send a message; return False if there is no agent."""
        if self._socket is None or self._process is None:
            return False
        line = encoded(message)
        try:
            sent = self._socket.send(line, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError:
            return False
        if sent < len(line):
            self._process.kill()
        return True

    async def call(self, request: Request, *, again: bool = False) -> CallResult:
        """Have the agent do something, and return the result.

        An agent that says nothing for long is ended.

        Args:
            request: The work.
            again: True to ask the next agent if this one is killed.

        Cancellation: the agent may do it all the same; see `under_way`.
        """
        await run_in_thread(self.start)
        asked, was_ended = self._ask(request, again=again), False
        try:
            while not asked.result.done():
                with anyio.move_on_after(min(_LOOK_SECONDS, ANSWER_SECONDS)):
                    await settled(asked.result)
                    break
                if self._is_silent:
                    if was_ended:
                        self._end_call(CallResult(asked.call.number, "its agent does not answer"))
                        break
                    await run_in_thread(self._end_silent)
                    was_ended = True
                if again:
                    await run_in_thread(self.start)
                    if self._starts > _STARTS:
                        self._end_call(CallResult(asked.call.number, "its agent is gone"))
        finally:
            asked.again = False
            if asked.connection is None:
                self._end_call(CallResult(asked.call.number))
        return asked.result.result()

    @property
    def under_way(self) -> list[Request]:
        """The requests that the agent works on, awaited or not."""
        with self._guard:
            return [each.call.request for each in self._calls.values()]

    def _ask(self, request: Request, *, again: bool = False) -> _Asked:
        asked = _Asked(Call(next(self._numbers), request), again=again)
        with self._guard:
            self._calls[asked.call.number] = asked
            self._heard_at = time.monotonic()
            if self._send(asked.call):
                asked.connection = self._socket
        if asked.connection is None and not again:
            self._end_call(CallResult(asked.call.number, "its agent is gone"))
        return asked

    def _end_call(self, result: CallResult) -> None:
        with self._guard:
            # A call that was repeated may be answered twice.
            asked = self._calls.pop(result.number, None)
        if asked is not None:
            asked.result.set_result(result)

    @property
    def _is_silent(self) -> bool:
        return time.monotonic() - self._heard_at >= ANSWER_SECONDS

    def _end_silent(self) -> None:
        """Kill an agent that does not answer, so that the next step starts another."""
        with self._guard:
            if self._process is not None and self._is_silent:
                self._fate = f"does not answer within {ANSWER_SECONDS:.0f} s"
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

    def close(self, *, flush: bool, timeout: float) -> tuple[bool, tuple[int, ...]]:
        """End the agent.

        Args:
            flush: True to write the last snapshot first. After a signal it is written in any case.
            timeout: Seconds for this.

        Returns:
            True if everything was written that was to be, and the steps that were not copied on.
        """
        if flush:
            # The agent may have been killed since the last snapshot.
            self.start()
        if self._process is None:
            return not flush, ()
        asked = self._ask(CloseRequest(flush))
        result, writes = asked.result, asked.connection is not None and self._setup.legs
        # The time begins with its first word: an agent that was just started takes a while.
        asked_at, ends = self._heard_at, math.inf
        while not (result.done() or self._is_silent) and time.monotonic() < ends:
            settled_here(result, min(_LOOK_SECONDS, ANSWER_SECONDS, ends - time.monotonic()))
            if ends == math.inf and self._heard_at != asked_at:
                ends = time.monotonic() + timeout
        closed = result.result() if result.done() else CallResult(problem="it is not done")
        with self._guard:
            if closed.problem:
                self._process.kill()
            self._process.wait()
            self._drop()
        return not closed.problem or not (flush or writes), closed.left

    def _drop(self) -> None:
        if self._socket is not None:
            # The listener sees the end of the connection.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket = None

    def _listen(self, connection: socket.socket) -> None:
        rest = b""
        with connection, contextlib.suppress(OSError):
            while piece := connection.recv(_PIECE):
                self._heard_at = time.monotonic()
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    message = decode_from_agent(line)
                    if isinstance(message, CallResult):
                        self._end_call(message)
                    elif not isinstance(message, CallProgress):
                        self._on_message(message)
        # The agent is gone and sends nothing more.
        with self._guard:
            if self._socket is connection:
                self._socket = None
            left = [each for each in self._calls.values() if each.connection is connection]
            for each in left:
                each.connection = None
        for each in left:
            if not each.again:
                self._end_call(CallResult(each.call.number, f"its agent {self._fate}"))


def _lower_priority(pid: int) -> None:
    """Put the trainer's work before that of an agent, which was just started."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    # Not every system has autogroups, and the kernel allows only a few changes per second.
    with contextlib.suppress(OSError):
        Path("/proc", str(pid), "autogroup").write_text(str(NICENESS))
