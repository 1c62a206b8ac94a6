"""The board: where in the root keepers leave notes for each other."""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct

from ckpt._format.manifest_head import MAX_BYTES
from ckpt._tiers.joins.notes import (
    LEADS,
    PARTS,
    Lead,
    Led,
    PartNote,
    Refusal,
    encoded,
    lead_name,
    lead_of,
    part_note,
    save_of,
)
from ckpt.errors import StorageError
from ckpt.storage._base import Storage

# How long a keeper may be silent before it is taken for dead; how often one shows that it is not;
# and after how many seconds without that another keeper of the same part takes its place.
SILENT_SECONDS, SIGN_SECONDS, STALE_SECONDS = 300.0, 10.0, 35.0
# How often notes are looked at: less and less often while nothing changes.
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.25, 3.0
# How often those that wait look whether the root has the step, though no note says so.
LOOK_SECONDS = 30.0
# How long it stays known what has become of a step.
KEPT_SECONDS = 3600.0
_NOTE_BYTES = 64 << 10


class SeenLead(Struct, frozen=True):
    """A lead as it was read.

    Attributes:
        data: Its bytes, which differ with each sign of life; None if there is none.
        lead: What it says.
    """

    data: bytes | None
    lead: Lead | None


class Board:
    """The notes of a root. All methods raise `StorageError` if the root refuses."""

    def __init__(self, storage: Storage) -> None:
        """Use the notes of this root."""
        self._storage = storage

    async def lead(self, save: str) -> SeenLead:
        """Return what is said of a save."""
        data = await self._storage.read_note(lead_name(save), _NOTE_BYTES)
        return SeenLead(data, lead_of(data))

    async def put_lead(self, save: str, lead: Lead) -> None:
        """Say something of a save."""
        await self._storage.put_note(lead_name(save), encoded(lead), replace=True)

    async def is_led(self, save: str, attempt: str) -> bool:
        """Tell whether an attempt is still the one that is joined."""
        lead = (await self.lead(save)).lead
        return isinstance(lead, Led) and lead.attempt == attempt

    async def save_led(self, step: int) -> str | None:
        """Return the save that is being joined as a step; None if none is."""
        for file in await self._storage.notes(LEADS):
            save = save_of(file)
            lead = None if save is None else (await self.lead(save)).lead
            if isinstance(lead, Led) and lead.step == step:
                return save
        return None

    async def parts(self, save: str = "") -> dict[PartNote, float]:
        """Return the notes of parts, of one save or all, and how many seconds old each is."""
        found = {}
        for file, age in (await self._storage.notes(PARTS)).items():
            note = part_note(file)
            if note is not None and save in ("", note.save):
                found[note] = age
        return found

    async def begin(self, note: PartNote) -> bool:
        """Put a first sign of life; False if there is one."""
        return await self._storage.put_note(note.name, b"{}", replace=False, durable=False)

    async def sign(self, note: PartNote) -> bool:
        """Renew a sign of life; False if there is none any more."""
        return await self._storage.touch_note(note.name)

    async def put(self, note: PartNote, content: bytes | Refusal) -> None:
        """Put a note of a part."""
        data = encoded(content) if isinstance(content, Refusal) else content
        await self._storage.put_note(note.name, data, replace=True)

    async def read(self, note: PartNote) -> bytes | None:
        """Return the content of a note of a part."""
        return await self._storage.read_note(note.name, MAX_BYTES)

    async def drop(self, notes: Collection[PartNote]) -> None:
        """Remove notes of parts."""
        for note in notes:
            await self._storage.drop_note(note.name, durable=False)

    async def sweep(self) -> None:
        """Remove notes that no keeper needs any more."""
        # These first: a note of a part is younger than the lead that it answers.
        parts = await self.parts()
        led: set[tuple[str, str]] = set()
        for file, age in (await self._storage.notes(LEADS)).items():
            save = save_of(file)
            if save is None:
                continue
            # One that says that a step is being joined is renewed all the time.
            if age > KEPT_SECONDS:
                await self._storage.drop_note(lead_name(save), durable=False)
                continue
            lead = (await self.lead(save)).lead
            if isinstance(lead, Led) and age <= SILENT_SECONDS:
                led.add((save, lead.attempt))
        await self.drop(
            [
                note
                for note, age in parts.items()
                # A refusal may come before the lead.
                if (
                    age > KEPT_SECONDS if not note.attempt else (note.save, note.attempt) not in led
                )
            ]
        )


def silent_error(who: str, where: str) -> StorageError:
    """Return the error for keepers that say nothing."""
    return StorageError(
        f"{where}: {who} said nothing for {SILENT_SECONDS:.0f} s. Their keepers have ended, or do "
        "not reach this place"
    )
