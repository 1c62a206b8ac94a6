"""The engine: state that all saves and restores of a manager share: memory, plans, handlers.

The base step: the last step that this program saved or restored, whose files a save may share. A
save counts before a restore: the restored step is the base only until the first save.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import platform
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from msgspec import Struct, field

from ckpt._engine.memory.arena import Arena, Buffers
from ckpt._engine.plan_cache import NO_SIDECARS, PlanCache, Sidecars
from ckpt._events import Observer
from ckpt._format.manifest import ItemEntry, Manifest
from ckpt._format.manifest_head import OWN_FORMAT, VIRTUAL, FileEntry
from ckpt._plan.base_chunks import BaseChunks, stored_report
from ckpt._plan.item_reports import ItemReport
from ckpt._plan.save_plan import SavePlan
from ckpt._plan.write_batches import WriteBatch
from ckpt._settings import Staging
from ckpt.handlers._registry import Handlers
from ckpt.storage._base import Storage
from ckpt.storage._manifests import files_folder

if TYPE_CHECKING:
    from ckpt._engine.chunk_extensions import ChunkExtension
    from ckpt._steps.run_hooks import RunHooks

logger = logging.getLogger("ckpt")


class SavedItem(Struct, frozen=True, eq=False):
    """One item, as this process wrote it.

    Attributes:
        plan: The plan of all its chunks.
        chunks: The chunks and their places in files.
        arrays: A weak reference to the array of each leaf, in order, so that its memory stays the
            caller's to free; None for anything but jax arrays, because only those cannot change in
            place.
        files: Its data files, by path relative to the item.
        is_first: True if no earlier step was known, so that any of its arrays may stay the same.
    """

    plan: SavePlan
    chunks: BaseChunks
    arrays: Sequence[weakref.ref[Any] | None]
    files: Mapping[str, FileEntry]
    is_first: bool = False

    def of_leaves(self, same: Sequence[int]) -> ItemReport | None:
        """Return the chunks of the leaves `same`, which a save can reuse; None if it has none."""
        if not same:
            return None
        unchanged = np.zeros(len(self.arrays), np.bool_)
        unchanged[same] = True
        found = self.chunks.of_leaves(unchanged)
        return found if found.files else None

    def same(self, leaves: Sequence[Any]) -> list[int]:
        """Return the numbers of the leaves that are the same array objects as in this save."""
        pairs = zip(self.arrays, leaves, strict=True)
        return [n for n, (known, leaf) in enumerate(pairs) if known and known() is leaf]

    def separate_chunks(self, kept: ItemReport | None) -> list[set[tuple[int, int]]]:
        """Return the chunks of each large file that was shared before, except the files of `kept`.

        These chunks may be unchanged again. So they stay together in one file, apart from all
        others.
        """
        taken = set() if kept is None else set(kept.files)
        shared = {path for path, entry in self.files.items() if entry.shared}
        return self.chunks.in_large_files(shared - taken)

    def expected(self, batches: Sequence[WriteBatch]) -> set[int]:
        """Return the numbers of the batches that are likely unchanged."""
        chunks = self.chunks
        return {number for number, batch in enumerate(batches) if chunks.is_expected(batch)}


class RestoredItem(Struct, frozen=True, eq=False):
    """One item of a step that was restored.

    Attributes:
        entry: The entry of the item in the manifest.
        files: Its data files, by path relative to the item.
    """

    entry: ItemEntry
    files: Mapping[str, FileEntry]

    def as_saved(self, plan: SavePlan) -> SavedItem:
        """Return the chunks of it that a save with this plan would write in the same form."""
        report = stored_report(self.entry, plan.leaves)
        return saved_item(plan, report, [None] * len(plan.leaves), self.files, None)


class BaseStep(Struct):
    """A committed step whose files the next one may share.

    Attributes:
        storage: Storage of the root.
        step_dir: The step directory, with the folder that its manifest names.
        items: The known items, by name.
        was_restored: True if this program restored the step and did not save it.
    """

    storage: Storage
    step_dir: str
    items: Mapping[str, SavedItem | RestoredItem] = field(default_factory=dict)
    was_restored: bool = False


def base_of_restored(storage: Storage, step_dir: str, manifest: Manifest) -> BaseStep | None:
    """Return a restored step as the base of the next save; None if a save can share nothing."""
    is_here = manifest.format == OWN_FORMAT and VIRTUAL not in manifest.requires
    if not is_here or not storage.traits.shares_files:
        return None
    items = {}
    for name, entry in manifest.items.items():
        files = {path: manifest.files.get(f"{name}/{path}") for path in entry.data_files}
        known = {path: file for path, file in files.items() if file is not None}
        if len(known) == len(files):
            items[name] = RestoredItem(entry, known)
    return BaseStep(storage, files_folder(step_dir, manifest), items, was_restored=True)


def saved_item(
    plan: SavePlan,
    report: ItemReport,
    arrays: Sequence[weakref.ref[Any] | None],
    files: Mapping[str, FileEntry],
    before: SavedItem | None,
) -> SavedItem:
    """Return an item as it was written.

    Args:
        plan: The plan of all its chunks.
        report: The places of the chunks.
        arrays: See `SavedItem`.
        files: See `SavedItem`.
        before: The same item of the step before; None if unknown.
    """
    # A chunk that stayed the same once is expected to do so again; without a step before, all may.
    same = np.ones(len(report.rows), np.bool_)
    if before is not None:
        same = before.chunks.same_again(report)
    sizes = [files[path].size for path in report.files]
    chunks = BaseChunks(plan.leaves, report, sizes, same)
    return SavedItem(plan, chunks, arrays, files, before is None)


def references(leaves: Sequence[Any]) -> list[weakref.ref[Any] | None]:
    """Return references that later tell if a leaf is the same array; see `SavedItem.arrays`."""
    return [weakref.ref(leaf) if isinstance(leaf, jax.Array) else None for leaf in leaves]


# Most files that a warning names.
_NAMED = 3


@functools.cache
def _known_versions() -> tuple[tuple[str, str], ...]:
    """Return the versions of the libraries that shape the format; the lookup is slow."""
    versions = {"python": platform.python_version()}
    for name in ("ckpt-jax", "jax", "numpy", "tensorstore"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return tuple(versions.items())


class Engine(Struct):
    """State that all saves and restores of a manager share.

    Attributes:
        staging: Settings of the staging of arrays.
        handlers: The handlers of items.
        observers: Receivers of the timed phases.
        arena: The staging memory.
        buffers: Source of the memory of restored arrays.
        plans: Plans of earlier saves.
        sidecars: The files of steps for other readers.
        extensions: What notes something about the chunks of arrays.
        notes: What extensions say of each step that is saved, by their names.
        hooks: Given a `Run`, each returns what an extension does beside the saves of its places.
        extension_states: Objects that extensions keep from call to call, by name of the extension.
        now_ns: Clock, in Unix nanoseconds.
        versions: Versions of the libraries that write.
        base_step: The last step that was saved, or until then the last that was restored; the next
            save can share its files.
        damaged: Data files of the root that are known to be damaged, by path relative to their
            step. Their names are random, so a file of that name is the same file in every step.
        writes_later: True if nothing is written while a caller waits: writes to memory would take
            cores from the copies that it waits for.
    """

    staging: Staging
    handlers: Handlers
    observers: tuple[Observer, ...]
    arena: Arena
    buffers: Buffers
    plans: PlanCache = field(default_factory=PlanCache)
    sidecars: Sidecars = NO_SIDECARS
    extensions: tuple[ChunkExtension, ...] = ()
    notes: Mapping[str, Any] = {}
    hooks: tuple[Callable[[Any], RunHooks], ...] = ()
    extension_states: dict[str, Any] = field(default_factory=dict)
    now_ns: Callable[[], int] = time.time_ns
    versions: dict[str, str] = field(default_factory=lambda: dict(_known_versions()))
    base_step: BaseStep | None = None
    damaged: set[str] = field(default_factory=set)
    writes_later: bool = False

    def distrust(self, files: Iterable[str], why: str) -> None:
        """Keep saves from reusing these files; warn once if the next save would have shared one.

        Args:
            files: Paths as in `damaged`.
            why: Text that names the step that has the files, and its fault.
        """
        new = set(files) - self.damaged
        self.damaged |= new
        known = {} if self.base_step is None else self.base_step.items
        shared = sorted(new & {f"{name}/{path}" for name, it in known.items() for path in it.files})
        if shared:
            more = f" and {len(shared) - _NAMED} more" if len(shared) > _NAMED else ""
            logger.warning(
                "%s. The next save would have shared %s%s, and writes anew what is in there. Steps "
                "that have such a file already may be damaged, too: verify them",
                why,
                ", ".join(shared[:_NAMED]),
                more,
            )
