"""`JoinNotes`: the notes that agents leave for each other in the root."""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct

from ckpt._format.manifest_head import MAX_BYTES
from ckpt._tiers.joins.note_formats import (
    PARTS,
    STATES,
    JoinInProgress,
    JoinState,
    PartNote,
    Refusal,
    decode_state,
    encode,
    part_note,
    save_of,
    state_name,
)
from ckpt.errors import StorageError
from ckpt.storage._base import Storage

# Silence after which an agent counts as dead; time between its signs of life; and silence after
# which another agent of the same part takes its place.
SILENT_SECONDS, SIGN_SECONDS, STALE_SECONDS = 300.0, 10.0, 35.0
# Shortest and longest pause between looks at notes: pauses grow while nothing changes.
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.25, 3.0
# Time after which waiting agents check if the root has the step, even if no note says so.
LOOK_SECONDS = 30.0
# Time for which the outcome of a step stays known.
KEPT_SECONDS = 3600.0
_NOTE_BYTES = 64 << 10


class JoinStateNote(Struct, frozen=True):
    """The state of a join, as it was read.

    Attributes:
        data: Bytes of the note, which differ with each sign of life; None if there is no note.
        state: Content of the note; None if it cannot be read.
    """

    data: bytes | None
    state: JoinState | None


class JoinNotes:
    """The notes of a root. All methods raise `StorageError` if the root refuses."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    async def state(self, save: str) -> JoinStateNote:
        """Return the state of the join of a save."""
        data = await self._storage.read("", state_name(save), _NOTE_BYTES)
        return JoinStateNote(data, decode_state(data))

    async def put_state(self, save: str, state: JoinState) -> None:
        """Write the state of the join of a save."""
        await self._storage.put_note(state_name(save), encode(state), replace=True)

    async def is_current(self, save: str, attempt: str) -> bool:
        """Return True if this attempt is still the one that is being joined."""
        state = (await self.state(save)).state
        return isinstance(state, JoinInProgress) and state.attempt == attempt

    async def save_in_progress(self, step: int) -> str | None:
        """Return the save that is being joined as this step; None if there is none."""
        for file in await self._storage.notes(STATES):
            save = save_of(file)
            state = None if save is None else (await self.state(save)).state
            if isinstance(state, JoinInProgress) and state.step == step:
                return save
        return None

    async def parts(self, save: str = "") -> dict[PartNote, float]:
        """Return the notes of parts, of one save or of all, with their ages in seconds."""
        found = {}
        for file, age in (await self._storage.notes(PARTS)).items():
            note = part_note(file)
            if note is not None and save in ("", note.save):
                found[note] = age
        return found

    async def begin(self, note: PartNote) -> bool:
        """Put a first sign of life; return False if there is one already."""
        return await self._storage.put_note(note.name, b"{}", replace=False, durable=False)

    async def sign(self, note: PartNote) -> bool:
        """Renew a sign of life; return False if the note is gone."""
        return await self._storage.touch_note(note.name)

    async def put(self, note: PartNote, content: bytes | Refusal) -> None:
        data = encode(content) if isinstance(content, Refusal) else content
        await self._storage.put_note(note.name, data, replace=True)

    async def read(self, note: PartNote) -> bytes | None:
        return await self._storage.read("", note.name, MAX_BYTES)

    async def drop(self, notes: Collection[PartNote]) -> None:
        for note in notes:
            await self._storage.drop_note(note.name, durable=False)

    async def sweep(self) -> None:
        """Remove notes that no agent needs any longer."""
        # Parts are read first: a note of a part is younger than the lead that it answers.
        parts = await self.parts()
        joining: set[tuple[str, str]] = set()
        for file, age in (await self._storage.notes(STATES)).items():
            save = save_of(file)
            if save is None:
                continue
            # The note of a join in progress is renewed all the time.
            if age > KEPT_SECONDS:
                await self._storage.drop_note(state_name(save), durable=False)
                continue
            state = (await self.state(save)).state
            if isinstance(state, JoinInProgress) and age <= SILENT_SECONDS:
                joining.add((save, state.attempt))
        await self.drop(
            [
                note
                for note, age in parts.items()
                # A refusal may come before its lead.
                if (
                    age > KEPT_SECONDS
                    if not note.attempt
                    else (note.save, note.attempt) not in joining
                )
            ]
        )


def silent_error(who: str, where: str) -> StorageError:
    """Return the error for silent agents."""
    return StorageError(
        f"{where}: {who} said nothing for {SILENT_SECONDS:.0f} s. Their agents have ended, or do "
        "not reach this place"
    )
