"""The result of a conversion, and the protocol of its targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from msgspec import Struct

from ckpt._conversion.checkpoint_items import CheckpointItem
from ckpt._format.manifest import Manifest


class Written(Struct, frozen=True):
    """The result of a conversion.

    Attributes:
        path: Path of the result.
        arrays: Number of its arrays.
        nbytes: Bytes of the arrays.
    """

    path: str
    arrays: int
    nbytes: int


class Target(Protocol):
    """A place and a format that a checkpoint is written to."""

    @property
    def format(self) -> str:
        """Name of the format."""

    async def write(
        self, items: Mapping[str, CheckpointItem], old: Manifest, budget: int
    ) -> Written:
        """Write items; durable on return.

        Args:
            items: The items by name.
            old: Manifest of their checkpoint.
            budget: Limit of the memory to use, in bytes.
        """
