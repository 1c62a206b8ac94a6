"""Another process that writes and reads the same bytes: what a busy disk does to an idle loop.

`python -m benchmarks.neighbour FILE BYTES` reads lines: `write` writes the bytes to the file and
fsyncs it, `read` reads them into memory; each is answered by a line when it is done.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Self

_BLOCK_BYTES = 1 << 23


class Neighbour:
    """The other process, from an event loop."""

    def __init__(self, file: Path, size_bytes: int) -> None:
        """Have it use `file`."""
        self._arguments = (str(file), str(size_bytes))

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __spec__.name, *self._arguments, stdin=PIPE, stdout=PIPE
        )
        await self._ask("ready")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def write(self) -> None:
        """Returns when the bytes are written and durable."""
        await self._ask("write")

    async def read(self) -> None:
        """Returns when the bytes are in the other process' memory."""
        await self._ask("read")

    async def _ask(self, word: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{word}\n".encode())
        if not await self._process.stdout.readline():
            raise RuntimeError("the other process has gone away")


def main() -> None:
    """Does what it is told until the other end goes away."""
    file, size_bytes = Path(sys.argv[1]), int(sys.argv[2])
    memory = memoryview(bytearray(os.urandom(_BLOCK_BYTES)) * -(-size_bytes // _BLOCK_BYTES))
    memory = memory[:size_bytes]
    while line := sys.stdin.readline():
        if line.strip() == "write":
            _write(file, memory)
        elif line.strip() == "read":
            _read(file, memory)
        sys.stdout.write("done\n")
        sys.stdout.flush()


def _write(file: Path, memory: memoryview) -> None:
    with open(file, "wb", buffering=0) as opened:
        for start in range(0, len(memory), _BLOCK_BYTES):
            opened.write(memory[start : start + _BLOCK_BYTES])
        os.fsync(opened.fileno())


def _read(file: Path, memory: memoryview) -> None:
    with open(file, "rb", buffering=0) as opened:
        for start in range(0, len(memory), _BLOCK_BYTES):
            opened.readinto(memory[start : start + _BLOCK_BYTES])


if __name__ == "__main__":
    main()
