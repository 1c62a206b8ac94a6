"""Steps of a root: their names, which of them are committed, and their manifests."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeGuard, TypeVar

import anyio

from ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    InvalidArgumentError,
    NotACheckpointError,
    StepDeletedError,
    StepNotFoundError,
    StorageError,
    located,
)
from ckpt.manifest import FILE_NAME, MAX_BYTES, Manifest, decode, peek_step
from ckpt.storage.base import Storage

__all__ = [
    "check_item_name",
    "check_step",
    "committed_steps",
    "latest_manifest",
    "latest_step",
    "read_manifest",
    "refuse_deleted",
    "while_read",
]

T = TypeVar("T")
# Nineteen digits hold every step a 64-bit counter can.
_STEP = re.compile(r"^(0|[1-9][0-9]{0,18})\Z")
_ITEM = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\Z")
# Names that Orbax or this library use in a step or a root for something else.
RESERVED_ITEMS = frozenset(
    {
        "AUTO",
        "_CHECKPOINT_DELETION",
        "_CHECKPOINT_METADATA",
        "_METADATA",
        "_sharding",
        "_strings.json",
        "array_metadatas",
        "commit_success.txt",
        "lanes",
        "manifest.ocdbt",
        "metadata",
        "metrics",
        "orbax.checkpoint",
        FILE_NAME,
    }
)
_CONCURRENT_READS = 16


def check_step(step: object) -> int:
    """Return `step` if it is one.

    Raises:
        InvalidArgumentError: It is not a whole number from 0 to 10**19 - 1.
    """
    # numpy integers are steps too; bool is an int only by accident.
    number = None if isinstance(step, bool) or not hasattr(step, "__index__") else step.__index__()
    if number is None or not _STEP.match(str(number)):
        raise InvalidArgumentError(
            f"step={step!r}: expected a whole number, 0 or greater, such as the training step"
        )
    return int(number)


def check_item_name(name: object) -> str:
    """Return `name` if an item may be called so.

    Raises:
        InvalidArgumentError: It could leave the step's directory, or is reserved.
    """
    if not _may_name_an_item(name):
        raise InvalidArgumentError(
            f"item name {name!r:.120}: expected 1 to 100 letters, digits, '_', '-' or '.', not "
            f"beginning with '.' or '-', and none of {', '.join(sorted(RESERVED_ITEMS))}"
        )
    return name


def _may_name_an_item(name: object) -> TypeGuard[str]:
    return (
        isinstance(name, str)
        and _ITEM.match(name) is not None
        and name not in RESERVED_ITEMS
        # Orbax takes what has this in its name for unfinished.
        and ".orbax-checkpoint-tmp" not in name
        and not name.startswith("ocdbt.process_")
    )


async def committed_steps(storage: Storage) -> list[int]:
    """Return every committed step of a root, ascending."""
    limiter = anyio.CapacityLimiter(_CONCURRENT_READS)
    found: list[int] = []

    async def look(step: int) -> None:
        async with limiter:
            if await _is_committed(storage, step):
                found.append(step)

    async def look_at_all(candidates: list[int]) -> bool | None:
        found.clear()
        with located():
            async with anyio.create_task_group() as tasks:
                for step in candidates:
                    tasks.start_soon(look, step)
        return True if len(found) == len(candidates) else None

    await _first_answer(storage, look_at_all)
    return sorted(found)


async def latest_step(storage: Storage) -> int | None:
    """Return the greatest committed step, or None; reads as few manifests as that takes."""

    async def look(candidates: list[int]) -> int | None:
        for step in reversed(candidates):
            if await _is_committed(storage, step):
                return step
        return None

    return await _first_answer(storage, look)


async def latest_manifest(storage: Storage) -> Manifest | None:
    """Return the manifest of the greatest committed step, or None; reads each once.

    Raises:
        CorruptCheckpointError: That step is committed, and its manifest contradicts itself.
        UnsupportedFormatError: It is of a later format.
    """

    async def look(candidates: list[int]) -> Manifest | None:
        for step in reversed(candidates):
            try:
                return await read_manifest(storage, str(step), step=step)
            except StepNotFoundError:
                continue
            except CorruptCheckpointError:
                if await _is_committed(storage, step):
                    raise
        return None

    return await _first_answer(storage, look)


async def _first_answer(
    storage: Storage, look: Callable[[list[int]], Awaitable[T | None]]
) -> T | None:
    """Ask `look` about the names of a root that may be steps until it answers, or they stay.

    A writer that keeps one step commits the next and deletes the one before. Who listed before and
    looks afterwards finds none of what was listed, though there was a step all the time.

    Args:
        storage: The root.
        look: Given the candidates, ascending, returns its answer; None to list again.
    """
    known: list[int] | None = None
    while (candidates := _candidates(await storage.entries())) != known:
        answer = await look(candidates)
        if answer is not None:
            return answer
        known = candidates
    return None


async def read_manifest(storage: Storage, entry: str, *, step: int | None = None) -> Manifest:
    """Return the manifest of an entry.

    Args:
        storage: The root.
        entry: The entry's name.
        step: The step it should be, or None for a one-shot checkpoint or any step.

    Raises:
        StepNotFoundError: `step` was given and there is no such committed step.
        NotACheckpointError: There is no checkpoint of this library at that entry.
        CorruptCheckpointError: Its manifest is damaged.
        UnsupportedFormatError: It is of a later format.
    """
    where = f"{storage.location}/{entry}"
    data = await storage.read(entry, FILE_NAME, MAX_BYTES)
    if data is None and step is not None:
        steps = await committed_steps(storage)
        listed = f"steps {_shorten(steps)}" if steps else "no committed step"
        raise StepNotFoundError(
            f"there is no such step; {storage.location} has {listed}", step=step
        )
    if data is None:
        raise NotACheckpointError(
            f"{where} holds no committed checkpoint: there is no {FILE_NAME} in it. Give the path "
            "that ckpt.save wrote, or one step of a manager's root (runs/a/100)"
        )
    with located(step=step):
        manifest = await anyio.to_thread.run_sync(
            lambda: decode(data, where=f"{where}/{FILE_NAME}")
        )
    if step is not None and manifest.step != step:
        raise CorruptCheckpointError(
            f"{where} holds step {manifest.step}: the directory was renamed. Give it its own name "
            "back",
            step=step,
        )
    if manifest.unnamed and len(manifest.items) != 1:
        raise CorruptCheckpointError(
            f"{where}: the manifest says that one object was saved without a name, and has "
            f"{len(manifest.items)} items",
            step=step,
        )
    # Items are directories: a name from a file must not lead out of the step.
    wrong = next((name for name in manifest.items if not _may_name_an_item(name)), None)
    if wrong is not None:
        raise CorruptCheckpointError(f"{where}: {wrong!r:.120} cannot be the name of an item")
    return manifest


@contextlib.asynccontextmanager
async def while_read(storage: Storage, entry: str, manifest: Manifest) -> AsyncIterator[None]:
    """Tell damage that the body meets in a checkpoint from its deletion meanwhile.

    Raises:
        StepDeletedError: The body failed, and what `manifest` describes is not there any more.
    """
    try:
        yield
    except (CorruptCheckpointError, StorageError) as error:
        await refuse_deleted(storage, entry, manifest, error)
        raise


async def refuse_deleted(
    storage: Storage, entry: str, manifest: Manifest, error: Exception | None = None
) -> None:
    """Raise if what a manifest describes is not there any more.

    Args:
        storage: The root.
        entry: The entry's name.
        manifest: What was there.
        error: What gave reason to look.

    Raises:
        StepDeletedError: It was deleted or replaced.
    """
    fate = await _fate_of(storage, entry, manifest)
    if fate is not None:
        raise StepDeletedError(
            f"{storage.location}/{entry} was {fate} while it was read. Take the latest step, or "
            "let the writer keep more steps",
            step=manifest.step,
        ) from error


async def _fate_of(storage: Storage, entry: str, manifest: Manifest) -> str | None:
    """Return what became of what `manifest` describes, or None if it is still there."""
    try:
        data = await storage.read(entry, FILE_NAME, MAX_BYTES)
        if data is None:
            return "deleted"
        found = await anyio.to_thread.run_sync(lambda: decode(data, where=entry))
    except CheckpointError:
        # What cannot be read, or is damaged, has not been deleted.
        return None
    return None if found.attempt == manifest.attempt else "replaced"


async def _is_committed(storage: Storage, step: int) -> bool:
    """A step is committed if and only if its manifest is there, whole, and its own."""
    try:
        data = await storage.read(str(step), FILE_NAME, MAX_BYTES)
    except CorruptCheckpointError:
        return False
    return data is not None and await anyio.to_thread.run_sync(peek_step, data) == step


def _candidates(entries: Iterable[str]) -> list[int]:
    return sorted(int(name) for name in entries if _STEP.match(name))


def _shorten(steps: list[int]) -> str:
    shown = [str(step) for step in (steps if len(steps) <= 12 else [*steps[:3], *steps[-8:]])]
    if len(steps) > 12:
        shown.insert(3, "...")
    return ", ".join(shown)
