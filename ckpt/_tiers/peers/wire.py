"""`Wire`: lines and bytes over a TCP connection, each wait within a time limit.

Every message is a line of JSON; the bytes of a file follow the line that tells their number.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, closing
from typing import TypeVar

import anyio
import anyio.lowlevel
import msgspec

T = TypeVar("T")

# Time limit of a wait: the other side should be about to send or to take the bytes.
SILENCE_SECONDS = 30.0
_PIECE = 1 << 16
# Bytes to transfer before yielding to other tasks.
_TURN_BYTES = 1 << 20
_NOT_TAKEN = "has taken nothing for"

_encode = msgspec.json.Encoder().encode


class WireError(Exception):
    """The other side has gone, is silent, or does not speak this protocol; the text says which."""


class Wire:
    """One connection. One task at a time may send, and one may receive."""

    def __init__(self, connection: socket.socket) -> None:
        """Use a connected socket; `close` closes it."""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._rest = bytearray()

    def close(self) -> None:
        self._socket.close()

    async def send(self, message: object) -> None:
        """Send a message as a line.

        Raises:
            WireError: The other side has gone, or does not take the message.
        """
        left = memoryview(_encode(message) + b"\n")
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                await _in_time(anyio.wait_writable(self._socket), _NOT_TAKEN)
            except OSError as error:
                raise _unreachable_error(error) from error

    async def send_file(self, fd: int, offset: int, nbytes: int) -> None:
        """Send bytes of a file.

        Raises:
            WireError: The other side has gone, does not take the bytes, or the file is too short.
        """
        end = offset + nbytes
        while offset < end:
            most = min(end - offset, _TURN_BYTES)
            try:
                sent = os.sendfile(self._socket.fileno(), fd, offset, most)
            except BlockingIOError:
                await _in_time(anyio.wait_writable(self._socket), _NOT_TAKEN)
                continue
            except OSError as error:
                raise _unreachable_error(error) from error
            if not sent:
                raise WireError("the file is shorter than it was")
            offset += sent
            await anyio.lowlevel.checkpoint()

    async def receive(self, kind: type[T], most: int) -> T | None:
        """Return the next message; None if the other side has ended the connection.

        Args:
            kind: Type of the message.
            most: Limit of its bytes.

        Raises:
            WireError: The line is no such message, or none comes.
        """
        line = await self._line(most)
        if line is None:
            return None
        try:
            return msgspec.json.decode(line, type=kind)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            # Bytes that are no text, and endlessly nested lists, raise the other two errors.
            raise WireError(f"sent {line[:40]!r}, which is not of this protocol") from None

    async def _line(self, most: int) -> bytes | None:
        looked = 0
        while (end := self._rest.find(b"\n", looked)) < 0:
            looked = len(self._rest)
            if looked > most:
                raise self._not_understood()
            piece = bytearray(_PIECE)
            count = await self._into(memoryview(piece))
            if not count:
                if self._rest:
                    raise WireError("has ended the connection")
                return None
            self._rest += piece[:count]
        if end > most:
            raise self._not_understood()
        line = bytes(self._rest[:end])
        del self._rest[: end + 1]
        return line

    def _not_understood(self) -> WireError:
        return WireError(f"sent {bytes(self._rest[:40])!r}, which is not of this protocol")

    async def fill(self, target: memoryview) -> None:
        """Fill `target` with received bytes.

        Raises:
            WireError: The other side has gone, or is silent.
        """
        filled = min(len(self._rest), len(target))
        target[:filled] = self._rest[:filled]
        del self._rest[:filled]
        while filled < len(target):
            count = await self._into(target[filled : filled + _TURN_BYTES])
            if not count:
                raise WireError("has ended the connection")
            filled += count
            await anyio.lowlevel.checkpoint()

    async def _into(self, target: memoryview) -> int:
        while True:
            try:
                return self._socket.recv_into(target)
            except BlockingIOError:
                await _in_time(anyio.wait_readable(self._socket), "was silent for")
            except OSError as error:
                raise _unreachable_error(error) from error


async def _in_time(event: Awaitable[None], problem: str) -> None:
    """Wait for an event of a socket; if it takes too long, raise an error with the time limit."""
    with anyio.move_on_after(SILENCE_SECONDS) as scope:
        await event
    if scope.cancelled_caught:
        raise WireError(f"{problem} {SILENCE_SECONDS:.0f} s")


@asynccontextmanager
async def connected(host: str, port: int) -> AsyncIterator[Wire]:
    """Connect to another agent.

    Raises:
        WireError: The agent cannot be reached.
    """
    with closing(Wire(await _connect(host, port))) as wire:
        yield wire


async def _connect(host: str, port: int) -> socket.socket:
    try:
        found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _unreachable_error(error) from error
    family, kind, protocol, _, place = found[0]
    connection = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
    try:
        code = connection.connect_ex(place)
        if code == errno.EINPROGRESS:
            await _in_time(anyio.wait_writable(connection), "does not answer within")
            code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise WireError(f"cannot be reached: {os.strerror(code)}")
    except BaseException:
        connection.close()
        raise
    return connection


def _unreachable_error(error: OSError) -> WireError:
    return WireError(f"cannot be reached: {error.strerror or error}")
