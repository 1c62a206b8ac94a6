"""The last snapshot goes to the root: as an ordinary step, what matters most first."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from ckpt._conversion.copies.place import CopyPlace, is_copy
from ckpt._conversion.copies.selection import Selection, selected
from ckpt._conversion.copies.step_copy import StepCopier, Uncounted
from ckpt._format.history import DroppedItem
from ckpt._format.manifest import Manifest
from ckpt._runtime.threads import run_in_thread
from ckpt._settings import Timeouts
from ckpt._tiers.keeper.messages import Flushed
from ckpt._tiers.peers.parts import STEPS, snapshots_in
from ckpt._tiers.shared_folder import FLUSHING
from ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    NotACheckpointError,
    UnsupportedFormatError,
)
from ckpt.storage._base import Storage
from ckpt.storage._local.storage import LocalStorage
from ckpt.storage._manifests import note_branch, read_manifest

# Names what took items away in a manifest.
_POLICY = "flushed in a hurry"


class Hurry(Struct, frozen=True):
    """How much time there is.

    Attributes:
        ends_at: When this host may end, by `time.monotonic`; None if it goes on.
        bytes_per_second: How fast earlier steps were saved; None if that is not known.
        first: Names of items, in the order in which they matter.
    """

    ends_at: float | None = None
    bytes_per_second: float | None = None
    first: tuple[str, ...] = ()


async def flush(folder: Path, target: Storage, after: int, hurry: Hurry) -> Flushed | None:
    """Write the newest snapshot that is whole to the root, unless that has a newer step.

    Args:
        folder: The folder with the snapshots.
        target: The root.
        after: The greatest step of the root.
        hurry: How much time there is.

    Returns:
        What has become of it; None if there is nothing to write.

    Cancellation: nothing is half there.
    """
    problem: Flushed | None = None
    tried: set[str] = set()
    while True:
        # The trainer may take another one meanwhile, and remove the one before.
        found = await run_in_thread(snapshots_in, folder / STEPS)
        left = [each for each in found if each.step > after and each.step_dir not in tried]
        if not left:
            return problem
        step, step_dir = left[0].step, left[0].step_dir
        tried.add(step_dir)
        own = folder / f"{FLUSHING}{os.getpid()}"
        began = time.monotonic()
        try:
            if not await run_in_thread(link_step, folder / STEPS / step_dir, own / step_dir):
                tried.discard(step_dir)
                continue
            source = CopyPlace(LocalStorage(own, Timeouts()), step_dir)
            done = await _write(source, CopyPlace(target, step_dir), hurry)
            passed_over = "" if problem is None else problem.problem
            seconds = time.monotonic() - began
            return replace(done, step=step, seconds=seconds, passed_over=passed_over)
        except (CorruptCheckpointError, NotACheckpointError, UnsupportedFormatError) as error:
            # An older one may be whole; what is wrong with the newest is told.
            problem = problem or Flushed(step, problem=str(error))
        except CheckpointError as error:
            # It is whole, and written once the root can be reached.
            return Flushed(step, problem=str(error))
        finally:
            await run_in_thread(shutil.rmtree, own, True)


def link_step(source: Path, target: Path) -> bool:
    """Give a step a second name, so that it stays while it is copied; False if it is gone."""
    shutil.rmtree(target, ignore_errors=True)
    try:
        shutil.copytree(source, target, copy_function=os.link)
    except (OSError, shutil.Error):
        if source.exists():
            raise
        return False
    return True


async def _write(source: CopyPlace, target: CopyPlace, hurry: Hurry) -> Flushed:
    manifest = await read_manifest(source.storage, source.name)
    await target.storage.prepare()
    await note_branch(target.storage, manifest.left_behind)
    found: Manifest | None = None
    # What is damaged there is moved aside by the copy.
    with contextlib.suppress(NotACheckpointError, CorruptCheckpointError):
        found = await read_manifest(target.storage, target.name)
    if found is not None and is_copy(manifest, found):
        return Flushed(0)
    has_part = found is not None and _is_part(manifest, found)
    whole = selected(manifest, ())
    assert whole is not None
    copier = StepCopier(Uncounted())
    try:
        part = None if has_part else _in_time(manifest, hurry)
        nbytes = 0
        if part is not None:
            nbytes = await copier.copy(source, manifest, part, target, overwrite=False)
        # The rest, too, if the host lives longer than it has said.
        is_replaced = has_part or part is not None
        nbytes += await copier.copy(source, manifest, whole, target, overwrite=is_replaced)
        return Flushed(0, nbytes=nbytes)
    finally:
        copier.close()


def _is_part(manifest: Manifest, found: Manifest) -> bool:
    """Tell whether a step is a part of another one, which was written in a hurry."""
    was_flushed = any(each.policy == _POLICY for each in found.dropped)
    if not was_flushed or not found.items.keys() < manifest.items.keys():
        return False
    part = selected(manifest, tuple(found.items))
    return part is not None and is_copy(part.manifest, found)


def _in_time(manifest: Manifest, hurry: Hurry) -> Selection | None:
    """Return the items that are written first; None where there is time for all, or only one."""
    if hurry.ends_at is None or hurry.bytes_per_second is None:
        return None
    room = (hurry.ends_at - time.monotonic()) * hurry.bytes_per_second
    sizes = {name: _size_of(manifest, name) for name in manifest.items}
    if sum(sizes.values()) <= room:
        return None
    chosen = items_in_time(sizes, room, hurry.first)
    if len(chosen) == len(sizes):
        return None
    part = selected(manifest, tuple(chosen))
    assert part is not None
    now = time.time_ns()
    dropped = tuple(
        DroppedItem(name, now, _POLICY, size) for name, size in sizes.items() if name not in chosen
    )
    return replace(part, manifest=replace(part.manifest, dropped=(*manifest.dropped, *dropped)))


def items_in_time(sizes: dict[str, int], room: float, first: Sequence[str]) -> list[str]:
    """Return the items to write when there is room for so many bytes; at least one.

    Those that matter most come first, then the smallest; the first always is among them, since a
    part of a step is better than none.
    """
    order = {name: number for number, name in enumerate(first)}
    names = sorted(sizes, key=lambda name: (order.get(name, len(order)), sizes[name], name))
    chosen = names[:1]
    room -= sizes[chosen[0]]
    for name in names[1:]:
        if sizes[name] <= room:
            chosen.append(name)
            room -= sizes[name]
    return chosen


def _size_of(manifest: Manifest, item: str) -> int:
    return sum(file.size for path, file in manifest.files.items() if path.partition("/")[0] == item)
