"""Counts what is read of data files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from ckpt.storage._local.storage import LocalStorage


class Patch(Protocol):
    """Sets attributes: `pytest.MonkeyPatch`, or what stands for it in a program."""

    @property
    def setattr(self) -> Callable[..., Any]: ...


class Reads:
    """What is read of the data files, as the storage is asked for it."""

    def __init__(self, patch: Patch) -> None:
        self.parts: list[tuple[str, int, int]] = []
        real = LocalStorage.read_block
        parts = self.parts

        async def read_block(
            self: LocalStorage,
            step_dir: str,
            path: str,
            offset: int,
            target: memoryview,
            then: Callable[[], None] | None = None,
        ) -> None:
            parts.append((path, offset, target.nbytes))
            await real(self, step_dir, path, offset, target, then)

        patch.setattr(LocalStorage, "read_block", read_block)

    def take(self) -> int:
        """Bytes that were read since; no byte of them twice."""
        taken, self.parts[:] = list(self.parts), []
        end: Counter[str] = Counter()
        for path, offset, nbytes in sorted(taken):
            assert offset >= end[path], f"{path}: read again before {end[path]}"
            end[path] = offset + nbytes
        return sum(nbytes for _, _, nbytes in taken)
