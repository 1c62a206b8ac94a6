"""The coordination service of `jax.distributed`, as values that the processes of a job share.

The service runs in process 0. Its client blocks the calling thread, without holding the GIL, and
its calls cannot be stopped. So a short request runs in a worker thread that is left behind when the
caller is cancelled. Waiting for a value is one long request in a thread of its own, shared by all
callers that wait for that value. The service forgets a request only when it has answered it, and
each open request takes some 16 KB of process 0; so waiting does not repeat requests.

Nothing in here runs anything on devices.
"""

from __future__ import annotations

import atexit
import secrets
import threading
import time
import weakref
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import anyio
import jax
from anyio.lowlevel import RunVar

from ckpt._runtime import jax_internals
from ckpt._runtime.futures import settled
from ckpt._runtime.threads import run_in_thread, start_thread
from ckpt.coordination._base import KeyValues
from ckpt.errors import CheckpointError, CoordinationError

T = TypeVar("T")

_CALLS = (
    "blocking_key_value_get_bytes",
    "key_value_delete",
    "key_value_dir_get_bytes",
    "key_value_increment",
    "key_value_set_bytes",
    "key_value_try_get_bytes",
)
_VALUES, _PARTS, _COUNTS = "ckpt/values", "ckpt/parts", "ckpt/counts"
# Seconds that one request waits for a value. Threads of abandoned waits last as long. An operation
# that has ended leaves none, since it has set all values that it waited for.
_POLL_SECONDS = 300.0
_EXIT_SECONDS = 30.0
_MOST_REQUESTS = 16
# One for each event loop: a limiter cannot be shared by two.
_LIMITER: RunVar[anyio.CapacityLimiter | None] = RunVar("ckpt_coordination_limiter")


class JaxDistributed:
    """The job that `jax.distributed.initialize` has joined.

    Raises:
        CoordinationError: `jax.distributed` was not initialized, or this version of jax lacks
            functions that are needed.

    Example:
        ```python
        jax.distributed.initialize()
        mgr = ckpt.CheckpointManager(root, coordinator=ckpt.coordination.JaxDistributed())
        ```
    """

    def __init__(self) -> None:
        """Find the client; no request is made."""
        state = jax_internals.distributed_state()
        client = getattr(state, "client", None)
        if client is None:
            raise CoordinationError(
                "jax.distributed is not initialized in this process; call "
                "jax.distributed.initialize() first, in every process of the job"
            )
        missing = [name for name in _CALLS if not hasattr(client, name)]
        if missing:
            raise CoordinationError(jax_internals.unknown_version(f"no {', '.join(missing)}"))
        self._index = int(state.process_id)
        self._count = int(state.num_processes)
        self._shared = _Shared(client, str(getattr(state, "coordinator_address", "")))

    @property
    def process_index(self) -> int:
        """The `process_id` of this process."""
        return self._index

    @property
    def process_count(self) -> int:
        """The `num_processes` of the job."""
        return self._count

    def key_values(self) -> KeyValues:
        """Return the service's values; they live from the first call to the end of process 0."""
        return self._shared


class _Shared:
    """`KeyValues` of the service."""

    def __init__(self, client: Any, address: str) -> None:
        self._client = client
        self._address = address
        self._guard = threading.Lock()
        self._polls: dict[str, Future[bytes | None]] = {}
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._is_joined_at_exit = False

    async def put(self, key: str, value: bytes) -> bool:
        return await self._run(self._set, key, value, False)

    async def touch(self, key: str, value: bytes) -> None:
        await self._run(self._set, key, value, True)

    async def list(self, folder: str) -> dict[str, bytes]:
        return await self._run(self._read_folder, folder)

    async def add(self, key: str) -> int:
        return await self._run(self._count_up, key)

    async def drop(self, folder: str) -> None:
        await self._run(self._delete, folder)

    async def wait(self, key: str, seconds: float) -> bytes | None:
        if seconds <= 0:
            return await self._run(self._look, key)
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            poll = self._poll(key)
            with anyio.move_on_after(left):
                await settled(poll)
            if not poll.done():
                break
            value = poll.result()
            if value is not None:
                return value
        return None

    # The methods below block, and run in threads.

    def _set(self, key: str, value: bytes, overwrite: bool) -> bool:
        head, parts = split(value)
        for part in parts:
            self._set_part(key, part)
        try:
            self._client.key_value_set_bytes(f"{_VALUES}/{key}", head, allow_overwrite=overwrite)
        except jax.errors.JaxRuntimeError as error:
            if not _has_code("ALREADY_EXISTS", error):
                raise
            for name, _ in parts:
                self._client.key_value_delete(f"{_PARTS}/{key}/{name}")
            return False
        return True

    def _set_part(self, key: str, part: Part) -> None:
        name, data = part
        self._client.key_value_set_bytes(f"{_PARTS}/{key}/{name}", data)

    def _join(self, key: str, head: bytes) -> bytes:
        def read(name: str) -> bytes:
            return bytes(self._client.key_value_try_get_bytes(f"{_PARTS}/{key}/{name}"))

        return join(head, read)

    def _look(self, key: str) -> bytes | None:
        try:
            head = self._client.key_value_try_get_bytes(f"{_VALUES}/{key}")
        except jax.errors.JaxRuntimeError as error:
            if _has_code("NOT_FOUND", error):
                return None
            raise
        return self._join(key, head)

    def _read_folder(self, folder: str) -> dict[str, bytes]:
        start = f"{_VALUES}/{folder}/"
        found = self._client.key_value_dir_get_bytes(start)
        return {
            (name := key.removeprefix(start)): self._join(f"{folder}/{name}", head)
            for key, head in found
        }

    def _count_up(self, key: str) -> int:
        return int(self._client.key_value_increment(f"{_COUNTS}/{key}", 1))

    def _delete(self, folder: str) -> None:
        for place in (_VALUES, _PARTS, _COUNTS):
            self._client.key_value_delete(f"{place}/{folder}/")

    def _poll(self, key: str) -> Future[bytes | None]:
        """Return the open wait for a value; a new one if there is none."""
        with self._guard:
            poll = self._polls.get(key)
            if poll is None:
                poll = Future()
                thread = threading.Thread(
                    target=self._wait_for, args=(key, poll), name="ckpt-wait", daemon=True
                )
                start_thread(thread)
                # The thread waits for the guard before it forgets the poll.
                self._polls[key] = poll
                self._threads.add(thread)
                if not self._is_joined_at_exit:
                    # A thread that comes back from the client while Python is taken down aborts the
                    # process. jax, whose hook is older, ends the client after this.
                    atexit.register(_join_threads, self._threads)
                    self._is_joined_at_exit = True
        return poll

    def _wait_for(self, key: str, poll: Future[bytes | None]) -> None:
        value: bytes | None = None
        failure: CheckpointError | None = None
        try:
            head = self._client.blocking_key_value_get_bytes(
                f"{_VALUES}/{key}", int(_POLL_SECONDS * 1000)
            )
            value = self._join(key, head)
        except Exception as error:
            if not _has_code("DEADLINE_EXCEEDED", error):
                failure = self._translated(error)
        with self._guard:
            # Removed first, so that a caller that finds nothing here begins a new wait.
            del self._polls[key]
        if failure is None:
            poll.set_result(value)
        else:
            poll.set_exception(failure)

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        limiter = _LIMITER.get(None)
        if limiter is None:
            limiter = anyio.CapacityLimiter(_MOST_REQUESTS)
            _LIMITER.set(limiter)
        try:
            return await run_in_thread(function, *args, abandon_on_cancel=True, limiter=limiter)
        except jax.errors.JaxRuntimeError as error:
            raise self._translated(error) from error

    def _translated(self, error: Exception) -> CheckpointError:
        """Return an error of the service as an error of this library."""
        if isinstance(error, CheckpointError):
            return error
        said = str(error).partition("\n")[0]
        what = (
            "cannot be reached: that process has ended, or the network between is down"
            if _has_code("UNAVAILABLE", error)
            else "refused a request"
        )
        failure = CoordinationError(
            f"the coordination service of jax.distributed, in process 0 at {self._address}, {what} "
            f"({said}); restart the job from the latest step"
        )
        failure.__cause__ = error
        return failure


def _join_threads(threads: weakref.WeakSet[threading.Thread]) -> None:
    deadline = time.monotonic() + _EXIT_SECONDS
    for thread in list(threads):
        thread.join(max(deadline - time.monotonic(), 0))


def _has_code(code: str, error: Exception) -> bool:
    return str(error).startswith(f"{code}:")


# gRPC takes messages of up to 4 MB by default, and a service that sends long messages keeps all
# others waiting.
PART_BYTES = 1 << 20
_WORTH_COMPRESSING = 512
_PLAIN, _COMPRESSED, _IN_PARTS = b"p", b"z", b"n"

Part = tuple[str, bytes]


def split(value: bytes) -> tuple[bytes, list[Part]]:
    """Return the head of a value, and the parts to be stored before it, by name."""
    body = _PLAIN + value
    if len(value) >= _WORTH_COMPRESSING:
        compressed = zlib.compress(value, 1)
        if len(compressed) < len(value):
            body = _COMPRESSED + compressed
    if len(body) <= PART_BYTES:
        return body, []
    name = secrets.token_hex(8)
    pieces = [body[at : at + PART_BYTES] for at in range(0, len(body), PART_BYTES)]
    parts = [(f"{name}/{number}", piece) for number, piece in enumerate(pieces)]
    return _IN_PARTS + f"{name} {len(parts)}".encode(), parts


def join(head: bytes, read: Callable[[str], bytes]) -> bytes:
    """Return the value of a head; `read` returns a part by its name.

    Raises:
        CoordinationError: `split` did not write the head or a part.
    """
    try:
        if head[:1] == _IN_PARTS:
            name, count = head[1:].decode().split(" ")
            head = b"".join(read(f"{name}/{number}") for number in range(int(count)))
        if head[:1] == _PLAIN:
            return head[1:]
        if head[:1] == _COMPRESSED:
            return zlib.decompress(head[1:])
    except (ValueError, zlib.error):
        pass
    raise CoordinationError(
        f"a value that the processes share is not understood ({head[:80]!r}); all processes of a "
        "job have to run the same version of this library"
    )
