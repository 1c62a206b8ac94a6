"""What a conversion has written, and what writes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from msgspec import Struct

from ckpt._conversion.stored_items import StoredItem
from ckpt._format.manifest import Manifest


class Written(Struct, frozen=True):
    """What was written.

    Attributes:
        path: Where it is.
        arrays: How many arrays it has.
        nbytes: Their bytes.
    """

    path: str
    arrays: int
    nbytes: int


class Target(Protocol):
    """Where a checkpoint is written, and as what."""

    @property
    def format(self) -> str:
        """The name of the format."""

    async def write(self, items: Mapping[str, StoredItem], old: Manifest, budget: int) -> Written:
        """Write items; durable on return.

        Args:
            items: The items by name.
            old: The manifest that they come from.
            budget: Most bytes of memory to use.
        """
