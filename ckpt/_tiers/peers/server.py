"""`PartServer`: lets other hosts of a job read the parts of snapshots on this host."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import anyio
import anyio.abc
import anyio.lowlevel

from ckpt._runtime.threads import run_in_thread
from ckpt._tiers.peers.parts import part_places
from ckpt._tiers.peers.wire import (
    HELLO_SECONDS,
    MOST_BYTES,
    MOST_HELLO_BYTES,
    PartOpenRequest,
    PartOpenResult,
    PartReadRequest,
    Wire,
    WireError,
)

_WAITING = 128
# Limit of connections at a time: each peer has one, and others are refused and must try again.
_MOST_CONNECTIONS = 64
# Limit of connections that have not proved the key so far: beyond it, the oldest one is ended.
_MOST_UNPROVEN = 64
_PAUSE_SECONDS = 0.1


class PartServer:
    """Serves parts on a socket; made by `serving`. Used on one event loop.

    Attributes:
        address: Host and port at which it listens.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: str,
        folders: Callable[[], list[tuple[int, Path]]],
        refused: Callable[[str], None],
    ) -> None:
        self._listener = listener
        self._key = key
        self._folders = folders
        self._refused = refused
        # Number of connections that have proved that they know the key.
        self._connections = 0
        # Time limits of the connections without a proof so far, the oldest first.
        self._unproven: dict[anyio.CancelScope, None] = {}
        host, port = listener.getsockname()[:2]
        self.address: tuple[str, int] = (str(host), int(port))

    async def accept(self, tasks: anyio.abc.TaskGroup) -> None:
        """Serve every connection in a task of its own, until cancelled."""
        while True:
            try:
                connection, place = self._listener.accept()
            except BlockingIOError:
                await anyio.wait_readable(self._listener)
                continue
            except OSError:
                # The connection is gone already, or descriptors are short.
                await anyio.sleep(_PAUSE_SECONDS)
                continue
            if len(self._unproven) >= _MOST_UNPROVEN:
                # A peer with the key proves it at once: the slowest connection gives way.
                oldest = next(iter(self._unproven))
                del self._unproven[oldest]
                oldest.cancel()
            time = anyio.CancelScope(deadline=anyio.current_time() + HELLO_SECONDS)
            self._unproven[time] = None
            tasks.start_soon(self._serve, connection, str(place[0]), time)
            # Let present connections go on, however many new ones come.
            await anyio.lowlevel.checkpoint()

    async def _serve(self, connection: socket.socket, host: str, time: anyio.CancelScope) -> None:
        try:
            with contextlib.closing(connection):
                wire, wanted = Wire(connection), None
                with time:
                    await wire.introduce(self._key, "server")
                    wanted = await wire.receive(PartOpenRequest, MOST_HELLO_BYTES)
                if wanted is None:
                    self._refused(f"a program at {host} does not prove the key of this job")
                    return
                self._unproven.pop(time, None)
                self._connections += 1
                try:
                    await self._answer(wire, wanted)
                finally:
                    self._connections -= 1
        except WireError as error:
            self._refused(f"a program at {host} {error}")
        except Exception as error:
            # An error of one connection must not end the others.
            self._refused(f"a program at {host} was not served: {error!r:.200}")
        finally:
            self._unproven.pop(time, None)

    async def _answer(self, wire: Wire, wanted: PartOpenRequest) -> None:
        files: dict[str, tuple[int, int]] = {}
        part = f"part {wanted.part} of the snapshot of step {wanted.step}"
        why = f"it has no {part} any more"
        if self._connections > _MOST_CONNECTIONS:
            await wire.send(PartOpenResult(problem="it serves as many others as it can"))
            return
        # Open files stay as they are, even if the snapshot is deleted meanwhile.
        with contextlib.ExitStack() as stack:
            places = await run_in_thread(self._places_of, wanted)
            for place in places:
                try:
                    files = await run_in_thread(_opened, place, stack)
                    break
                except FileNotFoundError:
                    stack.close()
                except OSError as error:
                    stack.close()
                    why = f"it cannot open its {part}: {error.strerror or error}"
            if not files:
                await wire.send(PartOpenResult(problem=why))
                return
            await wire.send(PartOpenResult({path: size for path, (_, size) in files.items()}))
            while (read := await wire.receive(PartReadRequest, MOST_BYTES)) is not None:
                fd, size = files.get(read.path, (-1, -1))
                if not 0 <= read.offset <= read.offset + read.nbytes <= size:
                    raise WireError(f"asked for bytes that are not there, of {read.path!r:.80}")
                await wire.send_file(fd, read.offset, read.nbytes)

    def _places_of(self, wanted: PartOpenRequest) -> list[Path]:
        return [
            place
            for process, folder in self._folders()
            for held, place in part_places(folder, process)
            if (held.part, held.step, held.save) == (wanted.part, wanted.step, wanted.save)
        ]


def _opened(step_dir: Path, stack: contextlib.ExitStack) -> dict[str, tuple[int, int]]:
    """Open all files of a step; return descriptor and size of each. The stack closes them."""
    found = {}
    for path in _files_below(step_dir):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        stack.callback(os.close, fd)
        found[path.relative_to(step_dir).as_posix()] = (fd, os.fstat(fd).st_size)
    return found


def _files_below(folder: Path) -> Iterator[Path]:
    for top, _, names in os.walk(folder, onerror=_raise):
        for name in names:
            path = Path(top, name)
            if stat.S_ISREG(path.lstat().st_mode):
                yield path


def _raise(error: OSError) -> None:
    raise error


def _is_of_all(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return found.is_unspecified or (mapped is not None and mapped.is_unspecified)


@contextlib.asynccontextmanager
async def serving(
    address: str,
    port: int,
    key: str,
    folders: Callable[[], list[tuple[int, Path]]],
    refused: Callable[[str], None],
) -> AsyncIterator[PartServer]:
    """Serve parts while the body runs.

    Args:
        address: The only address of this host to listen at.
        port: The port; 0 takes any free port.
        key: The key of the job.
        folders: Returns the folders to serve, each with the number of its process.
        refused: Called with the reason of each refused connection; must not block.

    Yields:
        The server.

    Raises:
        OSError: The address is not one address of this host, or the port is taken.

    Cancellation: all connections are ended.
    """
    try:
        found = await anyio.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except ValueError as error:
        raise OSError(f"{address!r} is not an address") from error
    family, kind, protocol, _, place = found[0]
    if _is_of_all(str(place[0])):
        raise OSError("that stands for all addresses of this host; give one of them")
    with contextlib.closing(socket.socket(family, kind, protocol)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(_WAITING)
        listener.setblocking(False)
        server = PartServer(listener, key, folders, refused)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.accept, tasks)
            yield server
            tasks.cancel_scope.cancel()
