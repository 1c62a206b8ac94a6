"""`SnapshotOffers`: the steps that each agent of a job can bring, so that all bring the same."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from ckpt._format.manifest_head import INVALID
from ckpt.storage._base import Storage

_OFFERS = ".ckpt-join-offers"
# Interval of the signs of an offer, and the age at which it is that of an ended agent.
OFFER_SIGN_SECONDS, _STALE_SECONDS = 5.0, 30.0
_NOTE_BYTES = 64 << 10

# Steps by save: a step that was saved anew has another save.
Steps = Mapping[str, int]
_STEPS = msgspec.json.Decoder(dict[str, int])


class SnapshotOffers:
    """The offers in a root. All methods raise `StorageError` if the root refuses."""

    def __init__(self, storage: Storage, process: int, count: int) -> None:
        """Use the notes of this root for one of `count` processes."""
        self._storage = storage
        self._process = process
        self._names = [f"{_OFFERS}/{number}-of-{count}" for number in range(count)]
        self._own: Steps = {}

    async def put(self, steps: Steps) -> None:
        """Offer these steps instead of the earlier ones."""
        self._own = dict(steps)
        name = self._names[self._process]
        await self._storage.put_note(name, msgspec.json.encode(self._own), replace=True)

    async def sign(self) -> None:
        """Renew the offer."""
        if not await self._storage.touch_note(self._names[self._process]):
            # The agent of an earlier run has withdrawn the offer of this process.
            await self.put(self._own)

    async def drop(self) -> None:
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
        """Return the save of the newest step that all offer, except `but`; None if none is left."""
        offers = [await self._read(name) for name in self._names]
        common = set.intersection(*(set(each.items()) for each in offers))
        left = [(step, save) for save, step in common if save not in but]
        return max(left)[1] if left else None

    async def _read(self, name: str) -> Steps:
        data = await self._storage.read("", name, _NOTE_BYTES)
        try:
            return {} if data is None else _STEPS.decode(data)
        except INVALID:
            return {}
