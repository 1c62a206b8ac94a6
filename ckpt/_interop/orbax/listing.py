"""What a list of steps has to know of those that Orbax wrote, without opening them.

A directory counts as a step of Orbax if it is one that Orbax has finished: on a disk it has its
final name then, in a store `commit_success.txt` is in it, or `_CHECKPOINT_METADATA` has the time of
the commit. A step of this library whose manifest is missing is none.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import anyio
from msgspec import Struct

from ckpt._format.digests import digest
from ckpt._format.metrics import flat_metrics
from ckpt._interop.orbax.layout import (
    MARK_V1,
    METRICS,
    MOST_BYTES,
    STEP_FILE,
    SUCCESS,
    Sizes,
    is_checkpoint,
    items_of,
    names_a_path,
    packed_files,
    unfinished,
)
from ckpt._interop.orbax.msgpack_tree import may_be_packed
from ckpt.storage._base import Storage

_MOST_LISTED = 16
# What such files usually have; a longer one is read in a second request.
_HEAD_BYTES = 1 << 16
METRICS_FILE = f"{METRICS}/{METRICS}"


class OrbaxHead(Struct, frozen=True):
    """A step of Orbax, as a list of steps has it.

    Attributes:
        attempt: A text that changes when another checkpoint takes the place of this one.
        created_ns: When its save began, in Unix nanoseconds; 0 where Orbax did not write it.
        committed_ns: When it was committed.
        metrics: Its metrics.
    """

    attempt: str
    created_ns: int
    committed_ns: int
    metrics: Mapping[str, float] | None


class _About(Struct):
    """`_CHECKPOINT_METADATA`: its bytes, and what they say."""

    data: bytes
    document: Mapping[str, Any]


async def stamps_of(storage: Storage, names: Sequence[str]) -> list[Hashable | None]:
    """Return for each step directory a value that changes when Orbax has finished another one."""
    if not storage.keeps_others:
        # Orbax gives a directory its final name when everything is in it.
        return await storage.stamps(names, ".")
    success = await storage.stamps(names, SUCCESS)
    about = await storage.stamps(names, STEP_FILE)
    pairs = zip(success, about, strict=True)
    return [None if pair == (None, None) else pair for pair in pairs]


async def heads_of(storage: Storage, names: Sequence[str]) -> list[OrbaxHead | None]:
    """Return what is known of each step directory; None for what Orbax has not finished."""
    read = partial(storage.read_each, names, limit=MOST_BYTES, head=_HEAD_BYTES)
    abouts = await read(STEP_FILE, parse=_parse_about)
    successes = await read(SUCCESS, parse=lambda data, _: names_a_path(data))
    metrics = await read(METRICS_FILE, parse=lambda data, _: _parse(data))
    heads: dict[str, OrbaxHead | None] = {}
    unclear: list[tuple[str, _About | None, Any]] = []
    for name, about, success, values in zip(names, abouts, successes, metrics, strict=True):
        is_ours = success is False
        if is_ours or (storage.keeps_others and success is None and not _is_committed(about)):
            heads[name] = None
        elif about is not None and success:
            heads[name] = head_of(about.data, about.document, values)
        else:
            # As Orbax wrote them years ago. Seldom, and a look at all files tells.
            unclear.append((name, about, values))
    slots = anyio.Semaphore(_MOST_LISTED)

    async def look(name: str, about: _About | None, values: Any) -> None:
        async with slots:
            sizes = await storage.files(name)
            head = _head_of_files(name, sizes, about, values)
            if head is not None and about is None and not await has_own_trees(storage, name, sizes):
                head = None
            heads[name] = head

    async with anyio.create_task_group() as tasks:
        for each in unclear:
            tasks.start_soon(look, *each)
    return [heads[name] for name in names]


def _head_of_files(name: str, sizes: Sizes, about: _About | None, values: Any) -> OrbaxHead | None:
    document = {} if about is None else about.document
    handlers = document.get("item_handlers")
    items, _ = items_of(sizes, handlers)
    if not is_checkpoint(items, sizes) or unfinished(name, sizes) is not None:
        return None
    if looks_like_ours(handlers, sizes) or (about is None and STEP_FILE in sizes):
        return None
    return head_of(identity_of_files(sizes) if about is None else about.data, document, values)


async def has_own_trees(storage: Storage, name: str, sizes: Sizes) -> bool:
    """Tell whether what has the name of Orbax's files of msgpack begins like them."""
    items, _ = items_of(sizes, None)
    for path in packed_files(items, sizes):
        head = bytearray(1)
        if not sizes[path]:
            return False
        await storage.read_block(name, path, 0, memoryview(head))
        if not may_be_packed(bytes(head)):
            return False
    return True


def looks_like_ours(handlers: object, sizes: Sizes) -> bool:
    """Tell whether this is a step of this library, copied in part or without its manifest."""
    return SUCCESS not in sizes and MARK_V1 in sizes and ".v1." not in str(handlers)


def identity_of_files(sizes: Sizes) -> bytes:
    """Return what tells a checkpoint without `_CHECKPOINT_METADATA` from another one."""
    return json.dumps(sorted((path, size or 0) for path, size in sizes.items())).encode()


def head_of(identity: bytes, document: Mapping[str, Any], metrics: Any) -> OrbaxHead:
    """Return what is known of a step.

    Args:
        identity: Bytes that another step does not have.
        document: What `_CHECKPOINT_METADATA` says.
        metrics: The content of the item of metrics, or None.
    """
    found = {**_numbers(document.get("metrics")), **_numbers(metrics)}
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


def _numbers(found: object) -> dict[str, float]:
    return flat_metrics(found) if isinstance(found, dict) else {}
