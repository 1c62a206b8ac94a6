"""`SignalTap`: tells the agent about signals at once, even while the main thread is busy.

Python runs signal handlers in the main thread, between two bytecodes: not while the thread is in a
compilation or another call of C. But the small function that the kernel calls writes the number of
the signal to a file descriptor at once (`signal.set_wakeup_fd`). This descriptor is a socket of the
agent. If an event loop has set its own descriptor there, a thread passes the numbers on to it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading


class SignalTap:
    """Writes signals to a socket. `install` and `remove` act in the main thread only."""

    def __init__(self) -> None:
        """Make the sockets; no signal is written yet."""
        # Both ends stay open here: a write must not fail when the agent is gone.
        alarm, self.heard = socket.socketpair()
        alarm.setblocking(False)
        self._alarm = alarm
        # The descriptor that the interpreter writes to: the alarm, or a relay thread's socket.
        self._own = -1
        # The descriptor that ours has replaced, and a duplicate of it.
        self._previous = self._duplicate = -1
        self._relay: tuple[socket.socket, socket.socket] | None = None
        self._is_known = False

    def install(self) -> None:
        """Replace the present wakeup descriptor; signals are passed on to the replaced one."""
        if threading.current_thread() is not threading.main_thread():
            return
        # Python may refuse: a subinterpreter gets no signals.
        with contextlib.suppress(ValueError, OSError):
            alarm = self._alarm.fileno()
            wanted = self._own if self._own != -1 else alarm
            current = _set(wanted)
            if current == wanted:
                return
            if current in (-1, alarm):
                # The owner of the replaced descriptor has left, and may have put back an older one.
                self._end_relay()
                self._own = alarm
            else:
                self._stand_before(current)
            if self._own != wanted:
                _set(self._own)
            if not self._is_known:
                # The registered method also keeps the sockets open while the interpreter writes.
                os.register_at_fork(after_in_child=self._leave_to_parent)
                self._is_known = True

    def _stand_before(self, current: int) -> None:
        self._end_relay()
        # Use a duplicate: the loop may close its descriptor, and another file may get that number.
        duplicate = os.dup(current)
        heard, told = socket.socketpair()
        told.setblocking(False)
        self._relay, self._own = (heard, told), told.fileno()
        self._previous, self._duplicate = current, duplicate
        relay = threading.Thread(
            target=_hand_on, args=(heard, self._alarm, duplicate), name="ckpt-signals", daemon=True
        )
        relay.start()

    def remove(self) -> None:
        """Put back the replaced descriptor, if nothing has replaced ours since; idempotent."""
        is_tapped = self._own != -1
        if is_tapped and threading.current_thread() is not threading.main_thread():
            # The interpreter goes on writing there: keep other files from getting these numbers.
            for each in (self._alarm, self.heard, *(self._relay or ())[1:]):
                each.detach()
            return
        if is_tapped:
            with contextlib.suppress(ValueError, OSError):
                current = _set(-1)
                _set(self._behind() if current == self._own else current)
        self._end_relay()
        self._own = -1
        self._alarm.close()
        self.heard.close()

    def _behind(self) -> int:
        """Return the descriptor that gets signals after ours is removed, or -1."""
        if self._relay is None:
            return -1
        with contextlib.suppress(OSError):
            if os.path.sameopenfile(self._previous, self._duplicate):
                return self._previous
        # Its owner has closed the descriptor, for example the tap of a manager that was opened and
        # closed before; the loop behind that tap still gets signals by the duplicate.
        poll = select.poll()
        poll.register(self._duplicate, 0)
        return -1 if poll.poll(0) else os.dup(self._duplicate)

    def _leave_to_parent(self) -> None:
        # A forked child has signals of its own.
        if self._own != -1:
            with contextlib.suppress(ValueError, OSError):
                current = _set(-1)
                if current != self._own:
                    _set(current)

    def _end_relay(self) -> None:
        if self._relay is not None:
            # The thread sees the end of its socket, and closes its own descriptor.
            self._relay[1].close()
            self._relay = None
            self._previous = self._duplicate = -1


def _set(fd: int) -> int:
    return signal.set_wakeup_fd(fd, warn_on_full_buffer=False)


def _hand_on(heard: socket.socket, alarm: socket.socket, previous: int) -> None:
    with heard, contextlib.suppress(OSError):
        while numbers := heard.recv(64):
            with contextlib.suppress(OSError):
                alarm.send(numbers)
            with contextlib.suppress(OSError):
                os.write(previous, numbers)
    os.close(previous)
