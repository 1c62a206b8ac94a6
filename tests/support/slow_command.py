"""Runs `ckpt` on a disk that takes `SLOW_READ_SECONDS` for each read of a data file.

Its progress is shown from the first byte on: `python -m tests.support.slow_command verify ...`.
With `HANG_AT_READ`, it writes `SLOW_SAYS` at that read, counted from 1, and stands there.
"""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

import anyio

from ckpt.cli import entry, progress
from ckpt.storage._local.storage import LocalStorage

# What it writes to standard error at the first read, for a test that waits for it.
_SAYS = [os.environ["SLOW_SAYS"]] if "SLOW_SAYS" in os.environ else []
_SECONDS = float(os.environ.get("SLOW_READ_SECONDS", "0.05"))
_HANG_AT = int(os.environ.get("HANG_AT_READ", "0"))
_reads = itertools.count(1)
_read_block = LocalStorage.read_block


async def _read_slowly(self: LocalStorage, *args: Any, **options: Any) -> None:
    number = next(_reads)
    while _SAYS and number >= _HANG_AT:
        sys.stderr.write(f"{_SAYS.pop()}\n")
        sys.stderr.flush()
    if number == _HANG_AT:
        await anyio.sleep_forever()
    await anyio.sleep(_SECONDS)
    await _read_block(self, *args, **options)


if __name__ == "__main__":
    LocalStorage.read_block = _read_slowly
    progress._DELAY_SECONDS = progress._PAUSE_SECONDS = 0.0
    entry.main()
