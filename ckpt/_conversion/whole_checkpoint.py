"""A checkpoint of this library, written from the items of another one."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from ckpt._commit import Commit, CommitHooks
from ckpt._conversion.item_copy import ItemCopy
from ckpt._conversion.stored_items import StoredItem
from ckpt._conversion.written import Written
from ckpt._engine.save.joint.multihost import SoloSave
from ckpt._engine.save.pipeline import save_step
from ckpt._engine.save.request import SaveCall, SaveCalls, SaveRequest
from ckpt._events import Observer
from ckpt._format.manifest import Manifest
from ckpt._format.metrics import json_metrics
from ckpt._interop.foreign import with_own_names
from ckpt._plan.format_rules import Formats
from ckpt._settings import Staging
from ckpt._steps.factory import make_engine
from ckpt._steps.saves.one_shot import prepared
from ckpt._tree.leaf_kinds import ARRAY_KINDS
from ckpt.storage._base import Storage


class CheckpointTarget(Struct, frozen=True):
    """A checkpoint to be written; a `Target`.

    Attributes:
        storage: The root.
        step_dir: The name of the checkpoint there.
        step: Its number, or None for a checkpoint by itself.
        overwrite: Whether an existing one is replaced.
        formats: How arrays are stored.
        observers: Receive the events of the save.
        keeps_times: Whether it stands for the step that it is made of, with its times and lineage.
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
        """The name of the format."""
        return "ckpt"

    async def write(self, items: Mapping[str, StoredItem], old: Manifest, budget: int) -> Written:
        """Write items, with the metrics and metadata that the old manifest has."""
        items = with_own_names(items)
        handlers = {name: ItemCopy(item.entry.handler) for name, item in items.items()}
        engine = make_engine(Staging(budget, "copy"), handlers, self.observers, self.formats)
        request = SaveRequest(
            self.step_dir,
            self.step,
            dict(items),
            old.unnamed,
            None if old.metrics is None else json_metrics(old.metrics),
            old.metadata,
            self.overwrite,
            parent=old.parent if self.keeps_times else None,
            left_behind=old.left_behind if self.keeps_times else (),
            dropped=old.dropped if self.keeps_times else (),
            times_ns=(old.created_ns, old.committed_ns) if self.keeps_times else None,
        )
        processes = SoloSave(engine.arena.capacity)
        whole = await prepared(self.storage, request, processes)
        hooks = CommitHooks(Commit(None, lambda: None))
        call = SaveCall(whole.items, whole.unnamed, began=hooks.watch.began)
        made = await save_step(engine, self.storage, whole, hooks, SaveCalls.of(call), processes)
        tables = [item.leaves for item in made.items.values()]
        kinds = [table.forms[number].kind for table in tables for number in table.form]
        return Written(
            f"{self.storage.location}/{self.step_dir}",
            sum(kind in ARRAY_KINDS for kind in kinds),
            sum(item.nbytes for item in made.items.values()),
        )
