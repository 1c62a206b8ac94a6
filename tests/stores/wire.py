"""As much of HTTP/1.1 as the stores of these tests need, on asyncio streams."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

__all__ = ["Head", "Loopback", "read_head", "read_pieces", "send"]

_PIECE = 1 << 18
_REASONS = {200: "OK", 204: "No Content", 206: "Partial Content", 304: "Not Modified"}
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True)
class Head:
    """The first line and the headers of a request or an answer; `raw` is what was sent."""

    raw: bytes
    first: tuple[str, str, str]
    headers: dict[str, str]

    @property
    def path(self) -> str:
        return unquote(urlsplit(self.first[1]).path)

    @property
    def query(self) -> dict[str, str]:
        found = parse_qs(urlsplit(self.first[1]).query, keep_blank_values=True)
        return {name: values[-1] for name, values in found.items()}

    @property
    def status(self) -> int:
        """The status of an answer."""
        return int(self.first[1])

    @property
    def length(self) -> int | None:
        """The length of the body; None where it ends with the connection or is in chunks."""
        return int(self.headers["content-length"]) if "content-length" in self.headers else None

    @property
    def is_chunked(self) -> bool:
        return "chunked" in self.headers.get("transfer-encoding", "").lower()


async def read_head(reader: asyncio.StreamReader) -> Head | None:
    """Return the next head; None where the other side has closed the connection."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    first, *lines = raw.decode("latin-1").rstrip("\r\n").split("\r\n")
    parts = (*first.split(" ", 2), "", "")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return Head(raw, (parts[0], parts[1], parts[2]), headers)


async def read_pieces(
    reader: asyncio.StreamReader, head: Head, *, answers: bool = False
) -> AsyncIterator[bytes]:
    """Yield the body that belongs to a head as it is sent, the marks of chunks included."""
    if head.is_chunked:
        while True:
            line = await reader.readuntil(b"\r\n")
            size = int(line.split(b";")[0], 16)
            yield line + await reader.readexactly(size + 2)
            if not size:
                return
    left = head.length
    if left is None:
        while answers and (piece := await reader.read(_PIECE)):
            yield piece
        return
    while left:
        piece = await reader.read(min(left, _PIECE))
        if not piece:
            raise asyncio.IncompleteReadError(b"", left)
        left -= len(piece)
        yield piece


async def send(
    writer: asyncio.StreamWriter,
    status: int,
    body: bytes = b"",
    *,
    length: int | None = None,
    **headers: Any,
) -> None:
    """Send an answer; `length` where the body announced is another than the one sent."""
    lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Other')}"]
    if status != 304:
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
    await writer.drain()


class Loopback:
    """A server on a free port of 127.0.0.1, on a loop and a thread of its own."""

    def __init__(self, handle: Handler, tls: ssl.SSLContext | None = None) -> None:
        self.port = 0
        self.is_up = threading.Event()
        self._handle = handle
        self._tls = tls
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop: asyncio.Event | None = None
        self._open: set[asyncio.Task[Any]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Loopback:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        await self._listen()
        self._ready.set()
        await self._stop.wait()
        if self._server is not None:
            await self._stop_listening(self._server)
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(
            self._connected, "127.0.0.1", self.port, limit=1 << 20, ssl=self._tls
        )
        self.port = self._server.sockets[0].getsockname()[1]
        self.is_up.set()

    def go_down(self, seconds: float) -> None:
        """Drop all connections, and listen again after some time, or go on; called on the loop."""
        listening = self._server if seconds else None
        if listening is not None:
            self.is_up.clear()
            self._server = None
        for writer in self._writers:
            _drop(writer)
        if listening is None:
            return
        task = asyncio.get_running_loop().create_task(self._come_back(listening, seconds))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _come_back(self, listening: asyncio.Server, seconds: float) -> None:
        await self._stop_listening(listening)
        await asyncio.sleep(seconds)
        await self._listen()

    async def _stop_listening(self, server: asyncio.Server) -> None:
        # asyncio connects what was accepted in the next rounds of the loop, and leaves its socket
        # open if the server is closed by then.
        for each in server.sockets:
            asyncio.get_running_loop().remove_reader(each.fileno())
        try:
            for _ in range(3):
                await asyncio.sleep(0)
        finally:
            server.close()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.is_up.is_set():
            _drop(writer)
            return
        # At once, and not in a task: one that is cancelled before it begins would close nothing.
        self._writers.add(writer)
        task = asyncio.get_running_loop().create_task(self._talk(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await self._handle(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()


def _drop(writer: asyncio.StreamWriter) -> None:
    # Ended, not reset: then curl sends again what it had sent.
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
    writer.transport.abort()
