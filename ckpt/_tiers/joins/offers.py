"""Offers: which steps each keeper of a job could bring, so that all bring the same one."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from ckpt._format.manifest_head import INVALID
from ckpt.storage._base import Storage

_OFFERS = ".ckpt-join-offers"
# A keeper that offers something says so this often; what is older is of one that has ended.
OFFER_SIGN_SECONDS, _STALE_SECONDS = 5.0, 30.0
_NOTE_BYTES = 64 << 10

# Steps by their save: a step that was saved anew is another one.
Steps = Mapping[str, int]
_STEPS = msgspec.json.Decoder(dict[str, int])


class Offers:
    """The offers in a root. All methods raise `StorageError` if the root refuses."""

    def __init__(self, storage: Storage, process: int, count: int) -> None:
        """Use the notes of this root, as one of so many processes."""
        self._storage = storage
        self._process = process
        self._names = [f"{_OFFERS}/{number}-of-{count}" for number in range(count)]
        self._own: Steps = {}

    async def put(self, steps: Steps) -> None:
        """Offer steps in place of those before."""
        self._own = dict(steps)
        name = self._names[self._process]
        await self._storage.put_note(name, msgspec.json.encode(self._own), replace=True)

    async def sign(self) -> None:
        """Show that the offer still stands."""
        if not await self._storage.touch_note(self._names[self._process]):
            # The keeper of an earlier run has taken its own back.
            await self.put(self._own)

    async def drop(self) -> None:
        """Take the offer back."""
        await self._storage.drop_note(self._names[self._process], durable=False)

    async def missing(self) -> list[int]:
        """Return the processes that offer nothing at the moment."""
        ages = await self._storage.notes(_OFFERS)
        return [
            process
            for process, name in enumerate(self._names)
            if ages.get(name.removeprefix(f"{_OFFERS}/"), _STALE_SECONDS) >= _STALE_SECONDS
        ]

    async def newest(self, but: Collection[str]) -> str | None:
        """Return the save of the newest step that all offer, without some; None if none is left."""
        offers = [await self._read(name) for name in self._names]
        common = set.intersection(*(set(each.items()) for each in offers))
        left = [(step, save) for save, step in common if save not in but]
        return max(left)[1] if left else None

    async def _read(self, name: str) -> Steps:
        data = await self._storage.read_note(name, _NOTE_BYTES)
        try:
            return {} if data is None else _STEPS.decode(data)
        except INVALID:
            return {}
