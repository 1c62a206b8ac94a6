"""What the agents of a job say to each other over TCP, and how: JSON, one message per line.

    server   ServerHello          a random number
    client   ClientProof          another one, and the proof that it knows the key
    server   ServerProof          its own proof
    client   PartOpenRequest      the wanted part of a snapshot
    server   PartOpenResult       the files of that part, or why there are none
    client   PartReadRequest      a range of bytes of a file; repeated at will
    server   these bytes

The server only reads: it writes nothing that a client sends. A client can name only the files that
the server has listed.

Both send a random number, and prove the key by the HMAC of both numbers and of their own role. So
the key is never sent, no proof is valid a second time, and no proof of one side is valid for the
other. This is the mutual challenge and response of ISO/IEC 9798-4, with HMAC-SHA-256 (RFC 2104,
RFC 6234).
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

# Limits of a message without a proof so far, of other messages, and of the list of files.
MOST_HELLO_BYTES, MOST_BYTES, MOST_FILES_BYTES = 1024, 1 << 16, 64 << 20
# Time limit for the proofs.
HELLO_SECONDS = 10.0

Role = Literal["server", "client"]

KEY_BYTES = NONCE_BYTES = 32

T = TypeVar("T")

# Time limit of a wait: the other side should be about to send or to take the bytes.
SILENCE_SECONDS = 30.0
_PIECE = 1 << 16
# Bytes to transfer before yielding to other tasks.
_TURN_BYTES = 1 << 20
_NOT_TAKEN = "has taken nothing for"

_encode = msgspec.json.Encoder().encode


class ServerHello(Struct, frozen=True, tag="ckpt-parts-1"):
    """The first line of a connection.

    Attributes:
        nonce: A random number of the server.
    """

    nonce: str


class ClientProof(Struct, frozen=True, tag="answer"):
    """The answer of the client.

    Attributes:
        nonce: A random number of the client.
        proof: Result of `proof_of`.
    """

    nonce: str
    proof: str


class ServerProof(Struct, frozen=True, tag="welcome"):
    """The server knows the key, too.

    Attributes:
        proof: Result of `proof_of`.
    """

    proof: str


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


def new_nonce() -> str:
    """Return a random number that is used once, in hexadecimal."""
    return secrets.token_hex(NONCE_BYTES)


def proof_of(key: str, role: Role, server_nonce: str, client_nonce: str) -> str:
    """Return the proof that one side of a connection knows the key."""
    # The length prevents a client, which chooses its own number, from moving bytes between the two.
    length = str(len(server_nonce))
    said = "\0".join(["ckpt parts 1", role, length, server_nonce, client_nonce])
    return hmac.new(bytes.fromhex(key), said.encode(), "sha256").hexdigest()


def is_proof(given: str, key: str, role: Role, server_nonce: str, client_nonce: str) -> bool:
    """Return True if the other side's proof is right; takes the same time for any answer."""
    wanted = proof_of(key, role, server_nonce, client_nonce)
    return hmac.compare_digest(given.encode(), wanted.encode())


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
