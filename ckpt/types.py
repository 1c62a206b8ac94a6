"""Classes of the objects that calls return, for annotations. Not to be instantiated by users."""

from __future__ import annotations

from ckpt._api.conversion import Conversion
from ckpt._api.partial import PartialSave, SyncPartialSave
from ckpt._api.stored_array import StoredArray, SyncStoredArray
from ckpt._api.trash import SyncTrash, Trash
from ckpt._api.watch import SyncWatch, Watch
from ckpt._commit import Arrival, SaveStatistics
from ckpt._engine.verify.report import Problem, VerifyReport
from ckpt._format.history import DroppedItem
from ckpt._steps.pins import Pin
from ckpt._steps.removal.trash import TrashedStep
from ckpt._steps.step_metadata import ItemInfo, LeafInfo
from ckpt._vitals.signs import VitalSigns

__all__ = [
    "Arrival",
    "Conversion",
    "DroppedItem",
    "ItemInfo",
    "LeafInfo",
    "PartialSave",
    "Pin",
    "Problem",
    "SaveStatistics",
    "StoredArray",
    "SyncPartialSave",
    "SyncStoredArray",
    "SyncTrash",
    "SyncWatch",
    "Trash",
    "TrashedStep",
    "VerifyReport",
    "VitalSigns",
    "Watch",
]


def __dir__() -> list[str]:
    return __all__
