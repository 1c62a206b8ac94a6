"""The read-only server of the page, for the browser of the user who started it."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AddressFamily
from typing import Any
from urllib.parse import parse_qs, urlsplit

import anyio

from ckpt._inspection.json_values import json_text
from ckpt.errors import CheckpointError, StepNotFoundError
from ckpt.page.document import ASSETS, RunReader, asset, served_page
from ckpt.step_names import Standard

_LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
# Addresses reserved for documentation: nothing is ever sent there.
_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


def place_of(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """Return the family and the address of a socket that listens on a host.

    Raises:
        OSError: There is no such host.
    """
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    return family, address


def reachable(family: socket.AddressFamily, host: str) -> str:
    """Return a host in the form of a URL, for a socket that listens on it.

    A browser cannot open "all addresses". Instead of them, the result is the address of this
    machine in its network, or the loopback address on a machine without a network.
    """
    if is_everywhere(host):
        host = _own_address(family)
    return f"[{host}]" if family == socket.AF_INET6 else host


def is_everywhere(host: str) -> bool:
    """Return True if a host means all addresses of this machine."""
    try:
        return ipaddress.ip_address(host or "0.0.0.0").is_unspecified
    except ValueError:
        return False


def _own_address(family: socket.AddressFamily) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as asked:
        try:
            # Connecting a datagram socket sends nothing. It selects a route, whose source address
            # is known.
            asked.connect((_ELSEWHERE[family], 9))
        except OSError:
            return _LOOPBACK[family]
        host: str = asked.getsockname()[0]
        return host


_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_COOKIE = "ckpt-page"
_PLAIN = Standard()


class PageServer(ThreadingHTTPServer):
    """Serves the page of one run.

    Requests must have the token in the URL: other users of the machine can reach a loopback port,
    too, and so can other pages in the user's browser.
    """

    daemon_threads = True

    def __init__(self, reader: RunReader, host: str, port: int) -> None:
        """Listen on `host` and `port`; port 0 takes a free one.

        Raises:
            OSError: The port is not available.
        """
        self.reader = reader
        # Named after the port: cookies are shared by all ports, and another run may be served as
        # well.
        self.cookie: str = ""
        self.token: str = secrets.token_urlsafe(24)
        # The index of a root must not be used by several threads at once.
        self.reading: threading.Lock = threading.Lock()
        family, address = place_of(host, port)
        self.family: AddressFamily = family
        self.address_family: int = family
        super().__init__(address[:2], _Handler)
        self.cookie = f"{_COOKIE}-{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Print one line for an error, and nothing for a reader that went away."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            sys.stderr.write(f"ckpt: the page could not be served: {error!r}\n")

    @property
    def url(self) -> str:
        """Address of the page, with its token."""
        host, port = self.server_address[:2]
        place = f"{reachable(self.family, str(host))}:{port}"
        return f"http://{place}/?token={self.token}"


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version = "ckpt"
    sys_version = ""
    # A silent client must not keep its thread forever.
    timeout = 60

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        given = parse_qs(url.query).get("token", [""])[0] or self._cookie()
        if not hmac.compare_digest(given.encode(), self.server.token.encode()):
            self._answer(
                HTTPStatus.FORBIDDEN,
                "text/plain",
                "Open the address that `ckpt ui` has printed: it holds a token.\n",
            )
            return
        name = url.path.removeprefix("/")
        if not name:
            cookie = f"{self.server.cookie}={given}; Path=/; HttpOnly; SameSite=Strict"
            self._answer(HTTPStatus.OK, "text/html", served_page(), cookie)
        elif name in ASSETS:
            self._answer(HTTPStatus.OK, ASSETS[name], asset(name))
        elif name == "run":
            self._read(lambda: anyio.run(self.server.reader.run))
        elif name == "norms":
            self._read(lambda: anyio.run(self.server.reader.norms))
        elif name.startswith("step/") and _PLAIN.step(name.removeprefix("step/")) is not None:
            number = int(name.removeprefix("step/"))
            self._read(lambda: anyio.run(self.server.reader.step, number))
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "There is no such page.\n")

    def _cookie(self) -> str:
        for each in self.headers.get("Cookie", "").split(";"):
            name, _, value = each.strip().partition("=")
            if name == self.server.cookie:
                return value
        return ""

    def _read(self, read: Callable[[], object]) -> None:
        try:
            with self.server.reading:
                record = read()
        except StepNotFoundError as error:
            self._error(HTTPStatus.NOT_FOUND, error)
        except CheckpointError as error:
            self._error(HTTPStatus.BAD_GATEWAY, error)
        else:
            body = json_text(record)
            self._answer(HTTPStatus.OK, "application/json", body)

    def _error(self, status: HTTPStatus, error: CheckpointError) -> None:
        body = json_text({"error": str(error)})
        self._answer(status, "application/json", body)

    def _answer(self, status: HTTPStatus, kind: str, text: str, cookie: str | None = None) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        if cookie is not None:
            self.send_header("Set-Cookie", cookie)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the terminal belongs to the command."""
