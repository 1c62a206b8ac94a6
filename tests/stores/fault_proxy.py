"""A proxy in front of a store: it counts and logs requests, slows them down, and spoils some.

`python -m tests.stores.fault_proxy PORT LATENCY BANDWIDTH` runs one as a process of its own, for
measurements: it prints its port, and at the end of its input what it has seen, as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import ssl
import struct
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from tests.stores.wire import Head, Loopback, read_head, read_pieces, send

__all__ = ["FAULTS", "Fault", "FaultProxy", "Refusal", "Seen"]

# `lost`: the store does it, and its answer is dropped; `lost and down`: and then nobody listens for
# a while. `bare`: the answer has no ETag. `truncated`: half of the body, and the
# length of all of it. `flipped`: one bit of the body is another. `rejected`: what stores without
# conditional writes answer.
Fault = Literal[
    "500",
    "503",
    "429",
    "reset",
    "slow",
    "truncated",
    "flipped",
    "hung",
    "lost",
    "lost and down",
    "bare",
]
FAULTS: tuple[Fault, ...] = get_args(Fault)
# What the store does not do, whoever asks how often.
Refusal = Literal["403", "501"]
_SLOW_S = 0.3
_SPAN = re.compile("[0-9]+")
_ETAG = re.compile(rb"etag:[^\r]*\r\n", re.IGNORECASE)


@dataclass
class Seen:
    """One request: what it was, and what became of it (status 0: no answer).

    `copies`: it asks for a copy of another object. `span`: first byte and last of what it asks for;
    empty for all.
    """

    number: int
    method: str
    path: str
    query: dict[str, str]
    conditional: bool
    copies: bool = False
    span: tuple[int, ...] = ()
    fault: str | None = None
    status: int = 0
    up: int = 0
    down: int = 0


class _Pipe:
    """A line that all share: so many bytes a second, both ways together."""

    def __init__(self, bandwidth: float | None) -> None:
        self._bandwidth = bandwidth
        self._free = 0.0

    async def pass_on(self, count: int) -> None:
        if self._bandwidth:
            now = asyncio.get_running_loop().time()
            self._free = max(self._free, now) + count / self._bandwidth
            if self._free - now > 0.002:
                await asyncio.sleep(self._free - now)


class FaultProxy:
    """A server on `port` that hands requests to the store on another port of this machine.

    Attributes:
        plan: Asked for every request, which is in the log by then; returns a fault or None.
        log: Every request since `forget`, in order.
        latency: Seconds that every request waits before it is handed on.
        down: For how many seconds nobody listens, where that is the fault; with 0 all connections
            are dropped, and new ones are taken.
    """

    def __init__(
        self,
        backend: int,
        *,
        latency: float = 0.0,
        bandwidth: float | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.plan: Callable[[Seen], Fault | Refusal | None] = _none
        self.log: list[Seen] = []
        self.latency = latency
        self.down = 0.3
        self.backend = backend
        self._pipe = _Pipe(bandwidth)
        self._server = Loopback(self._serve, tls)

    def __enter__(self) -> FaultProxy:
        self._server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.__exit__()

    @property
    def port(self) -> int:
        return self._server.port

    def wait_until_up(self) -> None:
        """Wait while nobody listens."""
        self._server.is_up.wait()

    def forget(self) -> None:
        """Begin a new log, without faults, once it listens again."""
        self.wait_until_up()
        self.plan = _none
        self.log = []

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        store: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        try:
            while (head := await read_head(reader)) is not None:
                if store is None:
                    store = await asyncio.open_connection("127.0.0.1", self.backend, limit=1 << 20)
                if not await self._exchange(head, reader, writer, *store):
                    return
        finally:
            if store is not None:
                store[1].close()
                with contextlib.suppress(ConnectionError):
                    await store[1].wait_closed()

    async def _exchange(
        self,
        head: Head,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answers: asyncio.StreamReader,
        asks: asyncio.StreamWriter,
    ) -> bool:
        """Hand one request on; return whether the connection may be used again."""
        conditional = any(name in head.headers for name in ("if-match", "if-none-match")) or (
            "ifGenerationMatch" in head.query
        )
        copies = any(f"x-{name}-copy-source" in head.headers for name in ("amz", "goog"))
        span = tuple(map(int, _SPAN.findall(head.headers.get("range", ""))))
        seen = Seen(len(self.log), head.first[0], head.path, head.query, conditional, copies, span)
        self.log.append(seen)
        seen.fault = fault = self.plan(seen)
        if self.latency:
            await asyncio.sleep(self.latency)
        if fault == "slow":
            await asyncio.sleep(_SLOW_S)
        if fault == "reset":
            _reset(writer)
            return False
        if head.headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        is_stopped = fault in ("500", "503", "429", "hung", "403", "501")
        if not is_stopped:
            asks.write(head.raw)
        async for piece in read_pieces(reader, head):
            seen.up += len(piece)
            await self._pipe.pass_on(len(piece))
            if not is_stopped:
                asks.write(piece)
                await asks.drain()
        if fault == "hung":
            # Until the other side has had enough.
            await reader.read()
            return False
        if is_stopped:
            assert fault is not None
            seen.status = int(fault)
            await send(writer, seen.status, b"try again later")
            return True
        return await self._hand_back(seen, fault, writer, answers)

    async def _hand_back(
        self,
        seen: Seen,
        fault: Fault | Refusal | None,
        writer: asyncio.StreamWriter,
        answers: asyncio.StreamReader,
    ) -> bool:
        answer = await read_head(answers)
        while answer is not None and answer.status == 100:
            answer = await read_head(answers)
        if answer is None:
            return False
        has_body = seen.method != "HEAD" and answer.status not in (204, 304)
        seen.status = answer.status
        if fault in ("lost", "lost and down"):
            if has_body:
                async for _ in read_pieces(answers, answer, answers=True):
                    pass
            if fault == "lost":
                _reset(writer)
            else:
                self._server.go_down(self.down)
            return False
        writer.write(_ETAG.sub(b"", answer.raw) if fault == "bare" else answer.raw)
        if has_body:
            async for piece in read_pieces(answers, answer, answers=True):
                if fault == "truncated":
                    piece = piece[: len(piece) // 2]
                if fault == "flipped" and piece:
                    middle = len(piece) // 2
                    piece = piece[:middle] + bytes([piece[middle] ^ 1]) + piece[middle + 1 :]
                await self._pipe.pass_on(len(piece))
                seen.down += len(piece)
                writer.write(piece)
                await writer.drain()
                if fault in ("truncated", "flipped"):
                    if fault == "truncated":
                        return False
                    fault = None
        await writer.drain()
        ends = answer.headers.get("connection", "").lower() == "close"
        return not ends and (not has_body or answer.is_chunked or answer.length is not None)


def _none(seen: Seen) -> Fault | None:
    return None


def _reset(writer: asyncio.StreamWriter) -> None:
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _main() -> None:
    port, latency, bandwidth = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    with FaultProxy(port, latency=latency, bandwidth=bandwidth or None) as proxy:
        sys.stdout.write(f"{proxy.port}\n")
        sys.stdout.flush()
        for _ in sys.stdin:
            log = list(proxy.log)
            proxy.forget()
            sys.stdout.write(json.dumps([asdict(seen) for seen in log]) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    _main()
