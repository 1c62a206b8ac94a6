"""The fetch of a part: copied from another host into a root here, with its digests compared."""

from __future__ import annotations

import contextlib

from ckpt._conversion.copies.selection import everything
from ckpt._conversion.copies.step_copy import ByteCounter, StepCopier
from ckpt._conversion.copies.step_location import ReadOnlyLocation, StepLocation, is_copy
from ckpt._format.manifest import Manifest
from ckpt._runtime.threads import run_in_thread
from ckpt._tiers.peers.protocol import PartOpenRequest
from ckpt._tiers.peers.remote_part import Peer, opened_part
from ckpt.errors import CheckpointError, CorruptCheckpointError
from ckpt.storage._base import Storage
from ckpt.storage._manifests import read_manifest


async def fetch_part(
    peer: Peer, key: str, wanted: PartOpenRequest, target: Storage, step_dir: str
) -> int:
    """Copy a part that another process has, unless it is here already.

    Another snapshot of the same step is replaced.

    Args:
        peer: The other process.
        key: The key of the job.
        wanted: The wanted part.
        target: The root for the copy.
        step_dir: Directory of the copy there.

    Returns:
        The number of copied bytes.

    Raises:
        StorageError: The peer cannot be reached, or has no such part; or there is no room.
        CorruptCheckpointError: The part of the peer is damaged, or is another part.

    Cancellation: nothing of the copy is visible.
    """
    await target.prepare()
    # Remove leftovers of an interrupted fetch.
    await target.sweep()
    async with opened_part(peer, key, wanted) as remote:
        manifest = await read_manifest(remote, step_dir, step=wanted.step)
        if manifest.save != wanted.save:
            raise CorruptCheckpointError(f"{peer} gave another snapshot", step=wanted.step)
        found = await _manifest_if_there(target, step_dir)
        if found is not None and await run_in_thread(is_copy, manifest, found):
            return 0
        with contextlib.closing(StepCopier(ByteCounter())) as copier:
            return await copier.copy(
                ReadOnlyLocation(remote, step_dir),
                manifest,
                everything(manifest),
                StepLocation(target, step_dir),
                overwrite=True,
            )


async def _manifest_if_there(target: Storage, step_dir: str) -> Manifest | None:
    try:
        return await read_manifest(target, step_dir)
    except CheckpointError:
        # There is no step, or a damaged one, which is replaced.
        return None
