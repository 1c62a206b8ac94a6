"""The bytes of a root or a checkpoint, by steps, items, leaves or dtypes."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from ckpt._inspection.locations import Checkpoint, RunRoot
from ckpt._runtime.threads import run_in_thread
from ckpt._steps.opened import open_step
from ckpt.errors import NotACheckpointError, StepNotFoundError, StorageError
from ckpt.storage._base import Storage
from ckpt.storage._manifests import files_folder
from ckpt.storage._resolve import local_path

if TYPE_CHECKING:
    from ckpt._format.manifest import Manifest
    from ckpt._inspection.leaf_records import LeafRecord

UsageKey = Literal["step", "item", "pattern", "dtype"]

# Files of no item or no array: manifests, indexes of items, files for other libraries.
OTHER = "(other files)"
_NUMBER = re.compile(r"[0-9]+")

# Device and number of a file on a disk.
_Inode = tuple[int, int]


class UsageShare(Struct, frozen=True):
    """The bytes of one step, item, pattern or dtype.

    Attributes:
        name: Its name; `(other files)` for files that belong to none.
        nbytes: Bytes of its files, or of its arrays in them; a file that several steps have is
            counted for the first of them.
        count: Number of its leaves in all steps; for steps and items, number of counted files.
        shared: Bytes of its files that an earlier step has as well, which are not in `nbytes`.
    """

    name: str
    nbytes: int
    count: int
    shared: int


class StorageUsage(Struct, frozen=True):
    """The bytes of a root or a checkpoint, by one key.

    Attributes:
        path: Path of the root or checkpoint.
        by: The key of the shares.
        nbytes: Bytes of all files, each counted once.
        shared: Bytes that were not counted, since an earlier step has the same file.
        linked: Bytes of counted files that also have names outside of these steps.
        shares: The shares, the largest first.
    """

    path: str
    by: UsageKey
    nbytes: int
    shared: int
    linked: int
    shares: list[UsageShare]


class _SizedFile(Struct, frozen=True):
    """A file of a step; without `inode` if it is not on a disk."""

    nbytes: int
    inode: _Inode | None = None
    links: int = 1


class _UsageCounter:
    """Adds up the files and arrays of steps."""

    def __init__(self, by: UsageKey) -> None:
        self.by = by
        self.nbytes = self.shared = 0
        self._sizes: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._shared: Counter[str] = Counter()
        # By file: number of times it was seen, and its links and size.
        self._seen: Counter[_Inode] = Counter()
        self._links: dict[_Inode, tuple[int, int]] = {}

    def add(self, name: str, manifest: Manifest | None, files: dict[str, _SizedFile]) -> None:
        """Add the files of a step, by their path in its folder."""
        fresh: set[str] = set()
        for path, each in files.items():
            key = self._key(name, path, manifest)
            if each.inode is not None:
                self._seen[each.inode] += 1
                self._links[each.inode] = each.links, each.nbytes
                if self._seen[each.inode] > 1:
                    self._shared[key] += each.nbytes
                    self._sizes[key] += 0
                    self.shared += each.nbytes
                    continue
            fresh.add(path)
            self.nbytes += each.nbytes
            self._sizes[key] += each.nbytes
            self._counts[key] += 1
        if manifest is not None and self.by in ("pattern", "dtype"):
            self._add_leaves(manifest, fresh)

    def _key(self, name: str, path: str, manifest: Manifest | None) -> str:
        if self.by == "step":
            return name
        item, slash, _ = path.partition("/")
        is_item = self.by == "item" and manifest is not None and slash and item in manifest.items
        return item if is_item else OTHER

    def _add_leaves(self, manifest: Manifest, fresh: set[str]) -> None:
        """Move the bytes of arrays from the share of other files to their own."""
        # Imported only here: lists of steps need no numpy.
        import numpy as np

        from ckpt._inspection.leaf_records import leaf_records

        records = leaf_records(manifest)
        for item, entry in manifest.items.items():
            table = entry.leaves
            is_fresh = np.array([f"{item}/{path}" in fresh for path in entry.data_files], bool)
            for number in range(len(table)):
                record = next(records)
                if not record.is_array:
                    continue
                first, last = int(table.firsts[number]), int(table.firsts[number + 1])
                files = table.files[first:last] if len(table.files) else np.zeros(last - first, int)
                # Only chunks in files that are counted for this step.
                counted = int(is_fresh[files].sum()) if last > first else 0
                nbytes = record.stored_bytes * counted // max(last - first, 1)
                key = self._leaf_key(record)
                self._sizes[key] += nbytes
                self._sizes[OTHER] -= nbytes
                self._shared[key] += record.stored_bytes - nbytes
                self._shared[OTHER] -= record.stored_bytes - nbytes
                self._counts[key] += 1

    def _leaf_key(self, record: LeafRecord) -> str:
        if self.by == "dtype":
            return record.dtype or ""
        pattern = _NUMBER.sub("*", record.path)
        return f"{record.item}: {pattern}" if record.item else pattern

    def result(self, path: str) -> StorageUsage:
        shares = [
            # Estimates of padding may be greater than a file by a few bytes.
            UsageShare(name, max(size, 0), self._counts[name], max(self._shared[name], 0))
            for name, size in self._sizes.items()
            if name != OTHER or size > 0
        ]
        shares.sort(key=lambda each: (-each.nbytes, each.name))
        linked = sum(
            nbytes for inode, (links, nbytes) in self._links.items() if links > self._seen[inode]
        )
        return StorageUsage(path, self.by, self.nbytes, self.shared, linked, shares)


async def usage_of(
    place: RunRoot | Checkpoint, by: UsageKey, *, unfinished: bool = True
) -> StorageUsage:
    """Return the bytes of a root or a checkpoint, by one key.

    Files with the same inode are one file.

    Args:
        place: The root or the checkpoint.
        by: The key of the shares.
        unfinished: True to count also the steps that Orbax has not finished.

    Raises:
        StorageError: The root or checkpoint cannot be read.
    """
    tally = _UsageCounter(by)
    if isinstance(place, Checkpoint):
        opened = place.opened
        files = await _files(place.storage, opened.step_dir, opened.manifest)
        if not files:
            # The checkpoint is a single file of another library.
            files = {
                f"{name}/{path}": _SizedFile(size)
                for name, item in opened.manifest.items.items()
                for path, size in zip(item.data_files[:1], [item.nbytes], strict=False)
            }
        step = opened.manifest.step
        tally.add(opened.step_dir if step is None else str(step), opened.manifest, files)
        return tally.result(place.location)
    for each in (await place.index.refresh()).values():
        manifest = None
        # A list of steps needs to know only how large the files are.
        if by != "step" or local_path(place.location) is None:
            try:
                found = await open_step(place.storage, each.step_dir, each.step)
            except (StepNotFoundError, NotACheckpointError):
                found = None
            if found is None:
                # The step was deleted meanwhile.
                continue
            manifest = found.manifest
        tally.add(str(each.step), manifest, await _files(place.storage, each.step_dir, manifest))
    for name in place.index.unfinished if unfinished else ():
        tally.add(name, None, await _files(place.storage, name))
    return tally.result(place.location)


async def _files(
    storage: Storage, step_dir: str, manifest: Manifest | None = None
) -> dict[str, _SizedFile]:
    """Return the files of a step, by path relative to the folder of its items."""
    local = local_path(storage.location)
    if local is not None:
        found = await run_in_thread(partial(_on_disk, str(local / step_dir)))
    else:
        sizes = await storage.files(step_dir)
        known = {} if manifest is None else manifest.sizes
        found = {
            path: _SizedFile(known.get(path, 0) if size is None or size < 0 else size)
            for path, size in sizes.items()
        }
    lies = step_dir if manifest is None else files_folder(step_dir, manifest)
    prefix = lies.removeprefix(step_dir).lstrip("/")
    start = f"{prefix}/" if prefix else ""
    return {path.removeprefix(start): each for path, each in found.items()}


def _on_disk(folder: str) -> dict[str, _SizedFile]:
    try:
        return {
            path: _SizedFile(status.st_size, (status.st_dev, status.st_ino), status.st_nlink)
            for path, status in _walk(folder)
            if stat.S_ISREG(status.st_mode)
        }
    except OSError as error:
        raise StorageError(f"{error.filename}: {error.strerror}", errno=error.errno) from error


def _walk(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    for directory, _, names in os.walk(folder, onerror=_unless_gone):
        below = directory[len(folder) + 1 :]
        for name in names:
            try:
                yield os.path.join(below, name), os.lstat(os.path.join(directory, name))
            except FileNotFoundError:
                continue


def _unless_gone(error: OSError) -> None:
    # A step may be deleted meanwhile, and a file of another library is not a directory.
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error
