"""A checkpoint of this library, written from the items of another checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from ckpt._commit import Commit, CommitHooks
from ckpt._conversion.checkpoint_items import CheckpointItem
from ckpt._conversion.item_copy import ItemCopy
from ckpt._conversion.written import Written
from ckpt._engine.save.save_request import SaveRequest
from ckpt._events import Observer
from ckpt._format.manifest import Manifest
from ckpt._format.metrics import json_metrics
from ckpt._interop.foreign import writable_items
from ckpt._job.solo_save import SoloSave
from ckpt._plan.format_rules import Formats
from ckpt._settings import Staging
from ckpt._steps.factory import make_engine
from ckpt._steps.saves.one_shot import save_one_shot
from ckpt._tree.leaf_kinds import ARRAY_KINDS
from ckpt.storage._base import Storage


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
        engine = make_engine(Staging(budget, "copy"), handlers, self.observers, self.formats)
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
