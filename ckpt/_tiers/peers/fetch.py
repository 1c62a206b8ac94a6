"""The fetch of a part: copied from another host into a root here, compared on its way."""

from __future__ import annotations

from ckpt._conversion.copies.place import CopyPlace, ReadPlace, is_copy
from ckpt._conversion.copies.selection import selected
from ckpt._conversion.copies.step_copy import StepCopier, Uncounted
from ckpt._format.manifest import Manifest
from ckpt._runtime.threads import run_in_thread
from ckpt._tiers.peers.remote_part import Peer, opened_part
from ckpt._tiers.peers.requests import Open
from ckpt.errors import CheckpointError, CorruptCheckpointError
from ckpt.storage._base import Storage
from ckpt.storage._manifests import read_manifest


async def fetch_part(peer: Peer, key: str, wanted: Open, target: Storage, step_dir: str) -> int:
    """Copy a part that another process has, unless it is here already.

    Another snapshot of that step is replaced.

    Args:
        peer: The other process.
        key: The key of the job.
        wanted: Which part.
        target: The root that gets it.
        step_dir: Its directory there.

    Returns:
        The bytes that were copied.

    Raises:
        StorageError: The other process cannot be reached, or has no such part; or there is no room.
        CorruptCheckpointError: What it has is damaged, or is another part.

    Cancellation: nothing can be seen of it.
    """
    await target.prepare()
    # What a fetch that was cut has left.
    await target.sweep()
    async with opened_part(peer, key, wanted) as remote:
        manifest = await read_manifest(remote, step_dir, step=wanted.step)
        if manifest.save != wanted.save:
            raise CorruptCheckpointError(f"{peer} gave another snapshot", step=wanted.step)
        found = await _found(target, step_dir)
        if found is not None and await run_in_thread(is_copy, manifest, found):
            return 0
        whole = selected(manifest, ())
        assert whole is not None
        copier = StepCopier(Uncounted())
        try:
            return await copier.copy(
                ReadPlace(remote, step_dir),
                manifest,
                whole,
                CopyPlace(target, step_dir),
                overwrite=True,
            )
        finally:
            copier.close()


async def _found(target: Storage, step_dir: str) -> Manifest | None:
    try:
        return await read_manifest(target, step_dir)
    except CheckpointError:
        # There is nothing, or it is damaged and replaced.
        return None
