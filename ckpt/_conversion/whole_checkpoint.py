"""A checkpoint of this library, written from the items of another checkpoint."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any

from msgspec import Struct

from ckpt._commit import Commit, CommitHooks
from ckpt._conversion.checkpoint_items import CheckpointItem, Written
from ckpt._engine.save.save_request import SaveRequest
from ckpt._events import Observer
from ckpt._format.manifest import ItemEntry, Manifest
from ckpt._format.manifest_head import json_metrics
from ckpt._interop.foreign import writable_items
from ckpt._interop.orbax.sidecars import ABOUT_FILE, OrbaxSidecars, about_item
from ckpt._job.solo import SoloSave
from ckpt._plan.adapt import Adapt
from ckpt._plan.save_plan import Formats
from ckpt._proof.run_notes import notes_on_run
from ckpt._settings import Staging
from ckpt._steps.saves.one_shot import save_one_shot
from ckpt._steps.service import make_engine
from ckpt._tree.leaf_kinds import ARRAY_KINDS
from ckpt.handlers._base import Deferred, ItemReader, ItemWriter
from ckpt.storage._base import Storage


class ItemCopy:
    """Saves a `CheckpointItem` under the name of the handler that wrote it; needs no class of it.

    Attributes:
        name: Name of that handler.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def accepts(self, item: Any) -> bool:
        """Return True for an item of a checkpoint."""
        return isinstance(item, CheckpointItem)

    async def stage(self, item: CheckpointItem, writer: ItemWriter) -> Awaitable[ItemEntry]:
        """Read and stage the arrays; files follow in the commit."""
        if item.tree is not None:
            await writer.stage(item.tree)

        async def commit() -> ItemEntry:
            for path in item.files:
                data = await item.read_file(path)
                # The save writes the library's own file for Orbax again.
                if path != ABOUT_FILE or data != about_item(item.entry):
                    await writer.write_file(path, data)
            # The engine counts the bytes of a tree.
            nbytes = 0 if item.tree is not None else item.entry.nbytes
            return ItemEntry(handler=self.name, nbytes=nbytes, data=item.entry.data)

        return Deferred(commit)

    async def load(self, entry: ItemEntry, like: Any, adapt: Adapt, reader: ItemReader) -> Any:
        """Not called: the handler of its name loads a saved item."""
        raise AssertionError("an ItemCopy saves items; the handler that wrote them loads them")


class CheckpointTarget(Struct, frozen=True):
    """A checkpoint to write; a `Target`.

    Attributes:
        storage: The root.
        step_dir: Name of the checkpoint in the root.
        step: Its number, or None for a one-shot checkpoint.
        overwrite: True to replace an existing checkpoint.
        formats: Storage formats of arrays.
        observers: Observers of the events of the save.
        keeps_times: True to keep the times and the lineage of the source step, as a copy of it.
    """

    storage: Storage
    step_dir: str
    step: int | None
    overwrite: bool
    formats: Formats | None
    observers: tuple[Observer, ...] = ()
    keeps_times: bool = False

    @property
    def format(self) -> str:
        """Name of the format."""
        return "ckpt"

    async def write(
        self, items: Mapping[str, CheckpointItem], old: Manifest, budget: int
    ) -> Written:
        """Write items, with the metrics and metadata of the old manifest."""
        items = {name: items[name] for name in writable_items(old)}
        handlers = {name: ItemCopy(item.entry.handler) for name, item in items.items()}
        engine = make_engine(
            Staging(budget, "copy"),
            handlers,
            self.observers,
            self.formats,
            sidecars=OrbaxSidecars(one_shot=self.step is None),
        )
        engine.notes = notes_on_run(old.extensions)
        request = SaveRequest(
            self.step_dir,
            self.step,
            dict(items),
            old.unnamed,
            None if old.metrics is None else json_metrics(old.metrics),
            old.metadata,
            "replace" if self.overwrite else "error",
            parent=old.parent if self.keeps_times else None,
            left_behind=old.left_behind if self.keeps_times else (),
            dropped=old.dropped if self.keeps_times else (),
            times_ns=(old.created_ns, old.committed_ns) if self.keeps_times else None,
        )
        processes = SoloSave(engine.arena.capacity)
        hooks = CommitHooks(Commit(None, lambda: None))
        made = await save_one_shot(engine, self.storage, request, processes, hooks)
        tables = [item.leaves for item in made.items.values()]
        kinds = [table.forms[number].kind for table in tables for number in table.form]
        return Written(
            f"{self.storage.location}/{self.step_dir}",
            sum(kind in ARRAY_KINDS for kind in kinds),
            sum(item.nbytes for item in made.items.values()),
        )
