"""Properties of steps of Orbax for lists, without opening the steps.

A directory counts as a step of Orbax if Orbax has finished it. On a disk it then has its final
name; in a store, it has `commit_success.txt`, or `_CHECKPOINT_METADATA` has the time of the commit.
A step of this library whose manifest is missing does not count.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import Struct

from ckpt._format.digests import digest
from ckpt._interop.orbax.layout import (
    METRICS,
    MOST_BYTES,
    STEP_FILE,
    SUCCESS,
    Sizes,
    is_checkpoint,
    is_own_mark,
    items_of,
    looks_like_ours,
    packed_files,
    unfinished,
)
from ckpt._interop.orbax.msgpack_tree import may_be_packed
from ckpt._runtime.tasks import for_each
from ckpt.storage._base import HasDirectories, Storage

_MOST_LISTED = 16
# Usual files are shorter; the rest of a longer one is read in a second request.
_HEAD_BYTES = 1 << 16
METRICS_FILE = f"{METRICS}/{METRICS}"


class OrbaxHead(Struct, frozen=True):
    """A step of Orbax or Flax, as an entry in a list of steps.

    Attributes:
        attempt: A text that changes when another checkpoint takes the place of this one.
        created_ns: Time at which its save began, in Unix nanoseconds; 0 if unknown.
        committed_ns: Time of its commit, in Unix nanoseconds; 0 if unknown.
        metrics: Its metrics, as they were passed.
    """

    attempt: str
    created_ns: int
    committed_ns: int
    metrics: Mapping[str, Any] | None
    library: str = "orbax"


class _About(Struct):
    """`_CHECKPOINT_METADATA`: its bytes and its content."""

    data: bytes
    document: Mapping[str, Any]


async def stamps_of(storage: Storage, names: Sequence[str]) -> list[Hashable | None]:
    """Return for each step directory a value that changes when Orbax finishes another step."""
    if isinstance(storage, HasDirectories):
        # Orbax gives a directory its final name when everything is in it.
        return [*await storage.stamps(names, ".")]
    success = await storage.stamps(names, SUCCESS)
    about = await storage.stamps(names, STEP_FILE)
    return [pair if any(pair) else None for pair in zip(success, about, strict=True)]


async def heads_of(storage: Storage, names: Sequence[str]) -> list[OrbaxHead | None]:
    """Return the head of each step directory; None if Orbax has not finished it."""
    read = partial(storage.read_each, names, limit=MOST_BYTES, head=_HEAD_BYTES)
    abouts = await read(STEP_FILE, parse=_parse_about)
    successes = await read(SUCCESS, parse=lambda data, _: data)
    metrics = await read(METRICS_FILE, parse=lambda data, _: _parse(data))
    heads: dict[str, OrbaxHead | None] = {}
    unclear: dict[str, tuple[bytes | None, _About | None, Any]] = {}
    for name, about, success, values in zip(names, abouts, successes, metrics, strict=True):
        if is_own_mark(success) or (
            not isinstance(storage, HasDirectories) and success is None and not _is_committed(about)
        ):
            heads[name] = None
        elif about is not None and success is not None and b"/" in success:
            heads[name] = head_of(about.data, about.document, values)
        else:
            # Orbax wrote such steps years ago. They are rare, and listing all their files decides.
            unclear[name] = success, about, values

    async def look(name: str) -> None:
        success, about, values = unclear[name]
        sizes = await storage.files(name)
        head = _head_of_files(name, sizes, success, about, values)
        if head is not None and about is None and not await has_own_trees(storage, name, sizes):
            head = None
        heads[name] = head

    await for_each(look, unclear, _MOST_LISTED)
    return [heads[name] for name in names]


async def begun_ns(storage: Storage, step_dir: str) -> int:
    """Return the time at which Orbax began a step, in Unix nanoseconds; 0 if unknown."""
    data = await storage.read(step_dir, STEP_FILE, MOST_BYTES)
    about = None if data is None else _parse_about(data, len(data))
    return 0 if about is None else _time(about.document, "init_timestamp_nsecs")


def _head_of_files(
    name: str, sizes: Sizes, success: bytes | None, about: _About | None, values: Any
) -> OrbaxHead | None:
    document = {} if about is None else about.document
    handlers = document.get("item_handlers")
    items = items_of(sizes, handlers)
    if not is_checkpoint(items, sizes) or unfinished(name, sizes) is not None:
        return None
    if looks_like_ours(success, handlers, sizes) or (about is None and STEP_FILE in sizes):
        return None
    return head_of(identity_of_files(sizes) if about is None else about.data, document, values)


async def has_own_trees(storage: Storage, name: str, sizes: Sizes) -> bool:
    """Return True if all files named like Orbax's msgpack files begin like them."""
    items = items_of(sizes, None)
    for path in packed_files(items, sizes):
        head = bytearray(1)
        if not sizes[path]:
            return False
        await storage.read_block(name, path, 0, memoryview(head))
        if not may_be_packed(bytes(head)):
            return False
    return True


def identity_of_files(sizes: Sizes) -> bytes:
    """Return bytes that identify a checkpoint without `_CHECKPOINT_METADATA`."""
    return json.dumps(sorted((path, size or 0) for path, size in sizes.items())).encode()


def head_of(identity: bytes, document: Mapping[str, Any], metrics: Any) -> OrbaxHead:
    """Return the head of a step.

    Args:
        identity: Bytes that identify the step.
        document: Content of `_CHECKPOINT_METADATA`.
        metrics: The content of the item of metrics, or None.
    """
    found: dict[str, Any] = {}
    for some in (document.get("metrics"), metrics):
        found |= some if isinstance(some, dict) else {}
    return OrbaxHead(
        digest(identity),
        _time(document, "init_timestamp_nsecs"),
        _time(document, "commit_timestamp_nsecs"),
        found if found or isinstance(metrics, dict) else None,
    )


def _is_committed(about: _About | None) -> bool:
    return about is not None and _time(about.document, "commit_timestamp_nsecs") > 0


def _parse_about(data: bytes, size: int) -> _About | None:
    document = _parse(data) if len(data) == size else None
    return _About(data, document) if isinstance(document, dict) else None


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _time(document: Mapping[str, Any], name: str) -> int:
    value = document.get(name)
    return value if isinstance(value, int) and 0 <= value < 1 << 62 else 0
