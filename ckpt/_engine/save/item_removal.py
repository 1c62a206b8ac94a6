"""Item removal: a committed step is published again without one of its items."""

from __future__ import annotations

import anyio
from msgspec.structs import replace

from ckpt._engine.save.republication import republish
from ckpt._engine.save.step_manifest import features
from ckpt._format.digests import digest
from ckpt._format.manifest import Manifest, encode, sizes
from ckpt._format.manifest_head import FILE_NAME, OWN_DISKS, VIRTUAL, FileEntry
from ckpt._plan.orbax_view import step_view
from ckpt._runtime.threads import run_in_thread
from ckpt.errors import InvalidArgumentError, located
from ckpt.storage._base import Attempt, Storage
from ckpt.storage._manifests import while_read


async def delete_item(storage: Storage, step_dir: str, manifest: Manifest, item: str) -> None:
    """Take one item out of a committed step directory.

    Everything else is put into a new attempt, without being copied if the store can do that, and
    the attempt replaces the old step atomically: at every instant one of the two is there, whole.
    Then the old one is removed. Metrics, metadata and times stay the same.

    Args:
        storage: The root.
        step_dir: Its name.
        manifest: Its manifest.
        item: Name of the item.

    Returns:
        The manifest of the new step.

    Raises:
        InvalidArgumentError: The step has no such item, or only this one; names those it has.
        StepDeletedError: The step was deleted or replaced meanwhile.
        CorruptCheckpointError: A file of another item is missing, or is not a regular file.
        StorageError: The store refused.

    Cancellation: operations under way are waited for, and the step is unchanged, unless publishing
    had begun: then the item is gone.
    """
    items = {name: each for name, each in manifest.items.items() if name != item}
    if item not in manifest.items:
        raise InvalidArgumentError(
            f"item={item!r:.120}: the step has no such item, only {', '.join(items)}",
            step=manifest.step,
        )
    if not items:
        raise InvalidArgumentError(
            f"item={item!r:.120} is the only item of the step; delete the step instead",
            step=manifest.step,
        )

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
                if not path.startswith(f"{item}/")
            },
        )
        async with while_read(storage, step_dir, manifest):
            return await _write_rest(storage, attempt, manifest, kept, item)

    with located(step=manifest.step):
        await republish(storage, step_dir, write, replacing=manifest.attempt)


async def _write_rest(
    storage: Storage, attempt: Attempt, old: Manifest, new: Manifest, item: str
) -> dict[str, int]:
    """Write all but one item to an attempt, its manifest last; return the sizes of its files."""
    step_dir = attempt.step_dir
    written: dict[str, bytes] = {}
    if not {OWN_DISKS, VIRTUAL} & set(old.requires):
        written = step_view(
            step_dir,
            new.items,
            old.metrics,
            old.metadata,
            old.created_ns,
            old.committed_ns,
            old.files,
            in_store=bool(attempt.folder),
        )
    linked = {
        path: known
        for path, known in old.files.items()
        if path not in written and not path.startswith(f"{item}/")
    }
    with located():
        async with anyio.create_task_group() as tasks:
            for path in linked:
                tasks.start_soon(storage.link, attempt, path, old.folder)
            for path, data in written.items():
                tasks.start_soon(storage.write, attempt, path, data)
    made = {path: FileEntry(size=len(data), digest=digest(data)) for path, data in written.items()}
    new = replace(new, files=linked | made)
    encoded = await run_in_thread(encode, new)
    await storage.write(attempt, FILE_NAME, encoded)
    return sizes(new, encoded)
