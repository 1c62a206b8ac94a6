"""Exports of the arrays of a checkpoint to formats of other libraries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from ckpt._conversion import safetensors_files, zarr_folder
from ckpt._conversion.checkpoint_items import CheckpointItem
from ckpt._conversion.export_folder import exported
from ckpt._conversion.tensors import PIECE_BYTES, ExportedArray, tensors_of
from ckpt._conversion.written import Written
from ckpt._format.dtypes import DTYPES
from ckpt._format.manifest import Manifest
from ckpt.errors import located
from ckpt.exports import Safetensors, Zarr

_MOST_PIECES = 8
# A piece is in memory twice: as it was read, and as it is written.
_COPIES = 2


class ExportTarget(Struct, frozen=True):
    """A planned export; a `Target`.

    Attributes:
        path: Path of the export.
        options: Its format.
        at: The branch that is exported; None for everything.
        overwrite: True to replace an existing export.
    """

    path: Path
    options: Safetensors | Zarr
    at: str | None
    overwrite: bool

    @property
    def format(self) -> str:
        """Name of the format."""
        return type(self.options).__name__.lower()

    async def write(
        self, items: Mapping[str, CheckpointItem], old: Manifest, budget: int
    ) -> Written:
        """Write the arrays of the items."""
        options = self.options
        module = safetensors_files if isinstance(options, Safetensors) else zarr_folder
        tensors = tensors_of(items, old.unnamed, self.at, module.problem_of)
        at_once = _at_once(tensors, budget)

        async def write(path: Path) -> None:
            if isinstance(options, Safetensors):
                await safetensors_files.write_safetensors(tensors, options, path, at_once)
            else:
                await zarr_folder.write_zarr(tensors, path, at_once)

        with located(step=old.step):
            await exported(self.path, self.overwrite, module.is_export, write)
        nbytes = sum(tensor.spec.nbytes for tensor in tensors)
        return Written(str(self.path), len(tensors), nbytes)


def _at_once(tensors: Sequence[ExportedArray], budget: int) -> int:
    """Return the number of pieces that may be in memory."""
    largest = max((_piece_bytes(tensor) for tensor in tensors), default=0)
    return min(max(budget // (_COPIES * max(largest, PIECE_BYTES)), 1), _MOST_PIECES)


def _piece_bytes(tensor: ExportedArray) -> int:
    chunk = tensor.spec.chunk
    if chunk is None:
        return min(tensor.spec.nbytes, PIECE_BYTES)
    return math.prod(chunk) * DTYPES[tensor.spec.dtype or ""].itemsize
