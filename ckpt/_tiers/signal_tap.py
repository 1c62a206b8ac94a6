"""Signals, told to the keeper the moment they come, whatever the main thread is doing.

Python runs handlers of signals in the main thread, between two steps of Python: not while it sits
in a compile or in another call of C. But the small function that the kernel calls writes the number
of the signal into a file descriptor at once (`signal.set_wakeup_fd`). That is a socket of the
keeper. Where an event loop has a descriptor of its own there, a thread hands the numbers on to it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading


class SignalTap:
    """Tells a socket of signals. `install` and `remove` act in the main thread only."""

    def __init__(self) -> None:
        """Make the sockets; nothing is told yet."""
        # Both ends stay open here: with the keeper gone, a write must not fail.
        alarm, self.heard = socket.socketpair()
        alarm.setblocking(False)
        self._alarm = alarm
        # What the interpreter writes to: the alarm itself, or a thread that hands numbers on.
        self._own = -1
        # What we stand before, and a duplicate of it.
        self._previous = self._duplicate = -1
        self._relay: tuple[socket.socket, socket.socket] | None = None
        self._is_known = False

    def install(self) -> None:
        """Take the place of what hears of signals now; what did goes on hearing of them."""
        if threading.current_thread() is not threading.main_thread():
            return
        # It may be refused: in another interpreter than the main one there are no signals.
        with contextlib.suppress(ValueError, OSError):
            alarm = self._alarm.fileno()
            wanted = self._own if self._own != -1 else alarm
            current = _set(wanted)
            if current == wanted:
                return
            if current in (-1, alarm):
                # What we stood before has left, and may have put back what it had found.
                self._end_relay()
                self._own = alarm
            else:
                self._stand_before(current)
            if self._own != wanted:
                _set(self._own)
            if not self._is_known:
                # This also keeps the sockets from being closed while the interpreter writes there.
                os.register_at_fork(after_in_child=self._leave_to_parent)
                self._is_known = True

    def _stand_before(self, current: int) -> None:
        self._end_relay()
        # A duplicate: the loop may close its own, and another file get that number.
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
        """Put back what was there, if nothing else has taken our place since; idempotent."""
        is_tapped = self._own != -1
        if is_tapped and threading.current_thread() is not threading.main_thread():
            # The interpreter goes on writing there: the numbers must not become other files'.
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
        """Return what is to hear of signals after us, or -1."""
        if self._relay is None:
            return -1
        with contextlib.suppress(OSError):
            if os.path.sameopenfile(self._previous, self._duplicate):
                return self._previous
        # It has closed its own, such as the tap of a manager that was opened before and has ended
        # before; the loop behind that one still hears by the duplicate.
        poll = select.poll()
        poll.register(self._duplicate, 0)
        return -1 if poll.poll(0) else os.dup(self._duplicate)

    def _leave_to_parent(self) -> None:
        # The signals of a child are its own.
        if self._own != -1:
            with contextlib.suppress(ValueError, OSError):
                current = _set(-1)
                if current != self._own:
                    _set(current)

    def _end_relay(self) -> None:
        if self._relay is not None:
            # The thread hears the end, and closes its own.
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
