"""Classes of the objects that calls return, for annotations. Not to be instantiated by users."""

from __future__ import annotations

from ckpt._api.managed_steps import Trash
from ckpt._api.partial import PartialSave
from ckpt._api.plain.managed_steps import SyncTrash
from ckpt._api.plain.partial import SyncPartialSave
from ckpt._api.plain.stored_array import SyncStoredArray
from ckpt._api.plain.watch import SyncWatch
from ckpt._api.stored_array import StoredArray
from ckpt._api.watch import Watch
from ckpt._calls.conversion import Conversion
from ckpt._commit import CommitFuture, Progress, SaveStatistics
from ckpt._engine.verify.report import Problem, VerifyReport
from ckpt._events import Event
from ckpt._format.manifest_head import DroppedItem
from ckpt._plan.adapt import RestoreReport
from ckpt._steps.pins import Pin
from ckpt._steps.removal.deletion_plan import TrashedStep
from ckpt._steps.step_metadata import ItemInfo, LeafInfo
from ckpt._tree.static_values import UnknownNode
from ckpt._vitals.signs import LeafSigns

__all__ = [
    "CommitFuture",
    "Conversion",
    "DroppedItem",
    "Event",
    "ItemInfo",
    "LeafInfo",
    "LeafSigns",
    "PartialSave",
    "Pin",
    "Problem",
    "Progress",
    "RestoreReport",
    "SaveStatistics",
    "StoredArray",
    "SyncPartialSave",
    "SyncStoredArray",
    "SyncTrash",
    "SyncWatch",
    "Trash",
    "TrashedStep",
    "UnknownNode",
    "VerifyReport",
    "Watch",
]


def __dir__() -> list[str]:
    return __all__
