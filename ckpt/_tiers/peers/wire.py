"""What the agents of a job say to each other over TCP, and how: JSON, one message per line.

    both     Hello                a random number
    client   PartOpenRequest      the wanted part of a snapshot
    server   PartOpenResult       the files of that part, or why there are none
    client   PartReadRequest      a range of bytes of a file; repeated at will
    server   these bytes

The server only reads: it writes nothing that a client sends. A client can name only the files that
the server has listed.

After the hellos, everything that is sent has a tag: the HMAC of its number and its bytes. Each side
has a key of its own for that, which is the HMAC of both random numbers and of its role, under the
key of the job. So a tag proves that its sender has the key of the job. A relay between the two
sides cannot forge, repeat, drop or reorder anything. It can read, since nothing is encrypted. Tags
are HMAC-SHA-256 (RFC 2104, RFC 6234), and so is the derivation of their keys (NIST SP 800-108).
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, closing
from typing import Annotated, Literal, TypeVar

import anyio
import anyio.lowlevel
import msgspec
from msgspec import Meta, Struct, field

# Limits of messages before the first tag was seen, of other messages, and of the list of files.
MOST_HELLO_BYTES, MOST_BYTES, MOST_FILES_BYTES = 1024, 1 << 16, 64 << 20
# Time limit for the hellos and the first tag.
HELLO_SECONDS = 10.0

Role = Literal["server", "client"]

KEY_BYTES = NONCE_BYTES = TAG_BYTES = 32

T = TypeVar("T")

# Time limit of a wait: the other side should be about to send or to take the bytes.
SILENCE_SECONDS = 30.0
_PIECE = 1 << 16
# Bytes to transfer before yielding to other tasks.
_TURN_BYTES = 1 << 20
_FORGED = "does not know the key of this job, or what it said was changed on its way"

_encode = msgspec.json.Encoder().encode


class Hello(Struct, frozen=True, tag="ckpt-parts-2"):
    """The first line of each side.

    Attributes:
        nonce: A random number that is used once, in hexadecimal.
    """

    nonce: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class PartOpenRequest(Struct, frozen=True, tag="open"):
    """Asks for the part of a snapshot that one process has saved.

    Attributes:
        part: Number of that process.
        step: The snapshot.
        save: Its `Manifest.save`.
    """

    part: int
    step: int
    save: str


class PartOpenResult(Struct, frozen=True, tag="opened"):
    """The files of a part.

    Attributes:
        files: Size in bytes of each file, by path.
        problem: Reason why there are none; empty if there are.
    """

    files: dict[str, Annotated[int, Meta(ge=0)]] = field(default_factory=dict)
    problem: str = ""


class PartReadRequest(Struct, frozen=True, tag="read"):
    """Asks for bytes of a file; they follow at once.

    Attributes:
        path: One of the listed files.
        offset: Offset of the first byte.
        nbytes: Number of bytes.
    """

    path: str
    offset: int
    nbytes: int


def new_key() -> str:
    """Return a new key of a job, in hexadecimal."""
    return secrets.token_hex(KEY_BYTES)


class Tags:
    """The tags of what one side of a connection sends, in its order."""

    def __init__(self, key: str, role: Role, server_nonce: str, client_nonce: str) -> None:
        said = f"ckpt parts 2 {role} {server_nonce} {client_nonce}".encode()
        self._key = hmac.digest(bytes.fromhex(key), said, "sha256")
        self._count = 0

    def next(self, data: bytes = b"") -> hmac.HMAC:
        """Return the tag of the next message or bytes, which may still be added to."""
        self._count += 1
        return hmac.new(self._key, self._count.to_bytes(8, "big") + data, "sha256")


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
        self._sent: Tags | None = None
        self._received: Tags | None = None

    def close(self) -> None:
        self._socket.close()

    async def introduce(self, key: str, role: Role) -> None:
        """Exchange random numbers; from then on everything that is sent has a tag.

        Raises:
            WireError: The other side has gone, or does not speak this protocol.
        """
        nonce = secrets.token_hex(NONCE_BYTES)
        await self.send(Hello(nonce))
        hello = await self.receive(Hello, MOST_HELLO_BYTES)
        if hello is None:
            raise WireError("has ended the connection")
        nonces = (nonce, hello.nonce) if role == "server" else (hello.nonce, nonce)
        other: Role = "client" if role == "server" else "server"
        self._sent, self._received = Tags(key, role, *nonces), Tags(key, other, *nonces)

    async def send(self, message: object) -> None:
        """Send a message as a line.

        Raises:
            WireError: The other side has gone, or does not take the message.
        """
        line = _encode(message)
        if self._sent is not None:
            line += b" " + self._sent.next(line).hexdigest().encode()
        await self._send(line + b"\n")

    async def send_file(self, fd: int, offset: int, nbytes: int) -> None:
        """Send bytes of a file.

        Raises:
            WireError: The other side has gone, does not take the bytes, or the file is too short.
        """
        assert self._sent is not None
        tag, end = self._sent.next(), offset + nbytes
        piece = memoryview(bytearray(min(nbytes, _TURN_BYTES)))
        while offset < end:
            count = os.preadv(fd, [piece[: end - offset]], offset)
            if not count:
                raise WireError("the file is shorter than it was")
            tag.update(piece[:count])
            await self._send(piece[:count])
            offset += count
            await anyio.lowlevel.checkpoint()
        await self._send(tag.digest())

    async def _send(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                await _in_time(anyio.wait_writable(self._socket), "has taken nothing for")
            except OSError as error:
                raise _unreachable_error(error) from error

    async def receive(self, kind: type[T], most: int) -> T | None:
        """Return the next message; None if the other side has ended the connection.

        Args:
            kind: Type of the message.
            most: Limit of its bytes.

        Raises:
            WireError: The line is no such message, its tag is wrong, or none comes.
        """
        line = await self._line(most)
        if line is None:
            return None
        if self._received is not None:
            line, _, tag = line.rpartition(b" ")
            _check(self._received.next(line).hexdigest().encode(), tag)
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
            WireError: The other side has gone, or is silent, or the bytes have a wrong tag.
        """
        assert self._received is not None
        tag, given = self._received.next(), bytearray(TAG_BYTES)
        await self._fill(target, tag)
        await self._fill(memoryview(given))
        _check(tag.digest(), given)

    async def _fill(self, target: memoryview, tag: hmac.HMAC | None = None) -> None:
        filled = 0
        while filled < len(target):
            piece = target[filled : filled + _TURN_BYTES]
            count = min(len(self._rest), len(piece))
            piece[:count] = self._rest[:count]
            del self._rest[:count]
            count = count or await self._into(piece)
            if not count:
                raise WireError("has ended the connection")
            if tag is not None:
                tag.update(piece[:count])
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


def _check(tag: bytes, given: bytes | bytearray) -> None:
    if not hmac.compare_digest(tag, given):
        raise WireError(_FORGED)


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
