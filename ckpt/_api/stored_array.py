"""`StoredArray`: one array of a checkpoint."""

from __future__ import annotations

from typing import Any

from ckpt._calls.oneshot import Array, ArrayBase
from ckpt._runtime.loop import run_once


class StoredArray(ArrayBase):
    """An array of a checkpoint, read in parts on demand.

    `await array[10:20]` reads the chunks that hold these rows, checks their digests, and returns a
    numpy array. An index has integers, slices and `...`; a slice with a step also reads the
    elements in between. Nothing is cached: the same part is read again from the storage.

    Example:
        ```python
        kernel = await ckpt.open_array("runs/a/100", "params.w")
        print(kernel.shape, kernel.dtype)
        rows = await kernel[:2]
        ```
    """

    async def __getitem__(self, index: Any) -> Array:
        return await run_once(self._call(index))
