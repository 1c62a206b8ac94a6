"""Republication: a committed step gets another manifest, with fewer items or other facts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING

import anyio
from msgspec.structs import replace

from ckpt._engine.save.save_request import renew_lease
from ckpt._format.manifest import Manifest, encode, features, sizes
from ckpt._format.manifest_head import FILE_NAME, OWN_DISKS, VIRTUAL, DroppedItem, FileEntry, digest
from ckpt._format.step_files import ITEM_FILES
from ckpt._runtime.futures import for_each
from ckpt._runtime.threads import run_in_thread
from ckpt.errors import InvalidArgumentError, located
from ckpt.storage._base import Attempt, Storage
from ckpt.storage._manifests import while_read

if TYPE_CHECKING:
    from ckpt._engine.plan_cache import Sidecars


async def republish(
    storage: Storage,
    step_dir: str,
    write: Callable[[Attempt], Awaitable[Mapping[str, int]]],
    *,
    overwrite: bool = True,
    replacing: str | None = None,
    give_up: Callable[[Attempt], Awaitable[None]] | None = None,
) -> None:
    """Publish an attempt that is quick to write.

    Args:
        storage: Storage of the root.
        step_dir: Name of the step directory.
        write: Writes all files of the attempt, the manifest last; returns their sizes by path.
        overwrite: True if an existing step directory is replaced.
        replacing: Id of an attempt; exactly its step directory is replaced, see `Storage.publish`.
        give_up: Ends an attempt that is not published; None discards it.

    Raises:
        StepExistsError: The step directory exists and may not be replaced.
        StepDeletedError: The step directory of `replacing` is gone.
        StorageError: The store refused.

    Cancellation: waits for operations under way, and changes nothing, unless publishing has begun:
    then the step is complete.
    """
    attempt: Attempt | None = await storage.begin(step_dir)
    assert attempt is not None
    try:
        async with anyio.create_task_group() as tasks:
            renewal = anyio.CancelScope()
            tasks.start_soon(renew_lease, storage, attempt, renewal)
            files = await write(attempt)
            # Shielded from here on: the result of the store's act must be known.
            with anyio.CancelScope(shield=True):
                await storage.publish(
                    attempt, overwrite=overwrite, replacing=replacing, files=files
                )
                attempt = None
            renewal.cancel()
    finally:
        if attempt is not None:
            with anyio.CancelScope(shield=True):
                await (give_up or storage.discard)(attempt)


async def delete_items(
    storage: Storage,
    step_dir: str,
    manifest: Manifest,
    going: Mapping[str, str | None],
    now_ns: int,
    sidecars: Sidecars,
) -> None:
    """Take items out of a committed step directory; the new manifest records their removal.

    All other files go into a new attempt, without a copy if the store can do that, and the attempt
    replaces the old step atomically: at every instant one of the two exists, whole. Then the old
    one is removed. Metrics, metadata and times stay the same.

    Args:
        storage: Storage of the root.
        step_dir: Name of the step directory.
        manifest: Manifest of the step.
        going: Names of the items, each with the policy that does not keep it; None if the item is
            deleted by hand.
        now_ns: The time, in Unix nanoseconds.
        sidecars: The files for other readers.

    Raises:
        InvalidArgumentError: The step has no such item, or no others; the error names its items.
        StepDeletedError: The step was deleted or replaced meanwhile.
        CorruptCheckpointError: A file of another item is missing, or is not a regular file.
        StorageError: The store refused.

    Cancellation: waits for operations under way, and leaves the step unchanged, unless publishing
    has begun: then the items are gone.
    """
    items = {name: each for name, each in manifest.items.items() if name not in going}
    _refuse_wrong(manifest, going, items)
    dropped = [
        DroppedItem(name, now_ns, policy, _bytes_of(manifest, name))
        for name, policy in going.items()
    ]

    notes = manifest.extensions
    if notes:
        from ckpt.extensions._readers import notes_on_step

        notes = await run_in_thread(notes_on_step, items, notes)

    async def write(attempt: Attempt) -> dict[str, int]:
        own_disks, virtual = OWN_DISKS in manifest.requires, VIRTUAL in manifest.requires
        kept = replace(
            manifest,
            items=items,
            attempt=attempt.id,
            folder=attempt.folder,
            requires=features(items, attempt.folder, own_disks=own_disks, virtual=virtual),
            sources={
                path: source
                for path, source in manifest.sources.items()
                if _item_of(path) not in going
            },
            dropped=[*manifest.dropped, *dropped],
            extensions=notes,
        )
        async with while_read(storage, step_dir, manifest):
            written = await run_in_thread(sidecars.of_step, step_dir, kept)
            return await _write_rest(storage, attempt, manifest, kept, going, written)

    with located(step=manifest.step):
        await republish(storage, step_dir, write, replacing=manifest.attempt)


def _refuse_wrong(manifest: Manifest, going: Collection[str], left: Collection[str]) -> None:
    missing = next((name for name in going if name not in manifest.items), None)
    if missing is not None:
        known = next((each for each in manifest.dropped if each.item == missing), None)
        raise InvalidArgumentError(
            f"item={missing!r:.120}: the step has no such item, only {', '.join(manifest.items)}"
            + ("" if known is None else f"; it was {known}"),
            step=manifest.step,
        )
    if not left:
        named = ", ".join(f"{name!r:.120}" for name in going)
        what = "is the only item" if len(going) == 1 else "are the only items"
        raise InvalidArgumentError(
            f"item={named} {what} of the step; delete the step instead", step=manifest.step
        )


def _bytes_of(manifest: Manifest, item: str) -> int:
    return sum(each.size for path, each in manifest.files.items() if _item_of(path) == item)


def _item_of(path: str) -> str:
    """Return the item of a file; for a file of no item, its whole path."""
    return path.partition("/")[0]


async def _write_rest(
    storage: Storage,
    attempt: Attempt,
    old: Manifest,
    new: Manifest,
    going: Collection[str],
    written: Mapping[str, bytes],
) -> dict[str, int]:
    """Write all but these items to an attempt, manifest last; return the sizes of its files.

    `written` are the files that are made anew.
    """
    linked = {
        path: known
        for path, known in old.files.items()
        # In the directory of the step itself, these may show an item that goes.
        if path not in written and path not in ITEM_FILES and _item_of(path) not in going
    }
    await for_each(lambda path: storage.link(attempt, path, old.folder), linked)
    await for_each(lambda path: storage.write(attempt, path, written[path]), written)
    made = {path: FileEntry(size=len(data), digest=digest(data)) for path, data in written.items()}
    new = replace(new, files=linked | made)
    encoded = await run_in_thread(encode, new)
    await storage.write(attempt, FILE_NAME, encoded)
    return sizes(new, encoded)
