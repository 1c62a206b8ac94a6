"""The notes that agents leave for each other in the root, and the parts that they bring.

The leader writes `JoinInProgress` or `DrainResult` to `.ckpt-joins/SAVE.lead`. The agent of part N
answers in the folder `.ckpt-join-parts`:

- `SAVE.ATTEMPT.N.alive`: it writes its files into this attempt.
- `SAVE.ATTEMPT.N.done`: all its files are there. The note is the report of the part.
- `SAVE.ATTEMPT.N.again`: it cannot go on in this attempt.
- `SAVE.-.N.refused`: the part will not come; the note is a `DrainResult`.

When a job has died, its agents also offer the snapshots that they can bring, so that all bring the
same, in the folder `.ckpt-join-offers`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Literal, TypeAlias, cast

import anyio
import msgspec
from msgspec import Struct

from ckpt._conversion.copies.step_copy import ByteCounter, Pace, StepCopier
from ckpt._conversion.copies.step_location import StepLocation
from ckpt._format.manifest import Manifest
from ckpt._format.manifest_head import (
    FILE_NAME,
    HEAD_BYTES,
    INVALID,
    MAX_BYTES,
    PART_FILE,
    FileEntry,
    digest,
    peek,
)
from ckpt._format.step_files import decode_part
from ckpt._tiers.drains.drain import DrainResult, Outcome
from ckpt._tiers.drains.drainer import DrainRoute
from ckpt.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StepExistsError,
    StepNotFoundError,
    StorageError,
)
from ckpt.storage._base import Attempt, Storage
from ckpt.storage._manifests import files_folder, read_manifest

logger = logging.getLogger("ckpt")

STATES, PARTS = ".ckpt-joins", ".ckpt-join-parts"
_LEAD = ".lead"
# Stands for the attempt of a refusal, which holds for all attempts.
_ANY = "-"

Kind = Literal["alive", "done", "again", "refused"]
_KINDS = ("alive", "done", "again", "refused")
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
_OFFERS = ".ckpt-join-offers"
# Interval of the signs of an offer, and the age at which it is that of an ended agent.
OFFER_SIGN_SECONDS, _STALE_SECONDS = 5.0, 30.0

# Steps by save: a step that was saved anew has another save.
Steps = Mapping[str, int]
_STEPS = msgspec.json.Decoder(dict[str, int])


class JoinInProgress(Struct, frozen=True, tag="led"):
    """A step is being joined.

    Attributes:
        step: The step.
        step_dir: The name of its directory in the root.
        attempt: The attempt that all agents write into.
        count: Number of parts.
        sign: A number that changes every few seconds while the leader is alive.
    """

    step: int
    step_dir: str
    attempt: str
    count: int
    sign: int = 0


JoinState: TypeAlias = JoinInProgress | DrainResult
_STATES = msgspec.json.Decoder(JoinState)
_RESULTS = msgspec.json.Decoder(DrainResult)


class PartNote(Struct, frozen=True):
    """The name of a note of a part.

    Attributes:
        save: The save of the part.
        attempt: The attempt; empty for a refusal.
        process: Number of the part.
        kind: Kind of the note.
    """

    save: str
    attempt: str
    process: int
    kind: Kind

    @property
    def name(self) -> str:
        """Folder and name of the note."""
        return f"{PARTS}/{self.save}.{self.attempt or _ANY}.{self.process}.{self.kind}"


def part_note(file: str) -> PartNote | None:
    """Return the note with this name in its folder; None if the file is something else."""
    fields = file.split(".")
    if len(fields) != len(PartNote.__struct_fields__):
        return None
    save, attempt, process, kind = fields
    if kind not in _KINDS or not (process.isascii() and process.isdigit()):
        return None
    return PartNote(save, "" if attempt == _ANY else attempt, int(process), cast("Kind", kind))


def state_name(save: str) -> str:
    """Return the folder and name of the note about a save."""
    return f"{STATES}/{save}{_LEAD}"


def save_of(file: str) -> str | None:
    """Return the save in the name of a note of the leader; None for another name."""
    return file.removesuffix(_LEAD) if file.endswith(_LEAD) else None


def encode(record: JoinState) -> bytes:
    return msgspec.json.encode(record)


def decode_state(data: bytes | None) -> JoinState | None:
    """Return the content of a leader's note; None if there is none, or it cannot be read."""
    try:
        return None if data is None else _STATES.decode(data)
    except INVALID:
        return None


def decode_refusal(data: bytes | None) -> DrainResult:
    """Return the content of a refusal; `damaged` if it cannot be read."""
    try:
        return _RESULTS.decode(data or b"")
    except INVALID:
        return DrainResult(-1, "damaged", reason="its note cannot be read")


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

    async def put(self, note: PartNote, content: bytes | DrainResult) -> None:
        data = encode(content) if isinstance(content, DrainResult) else content
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


class JoinPart(Struct, frozen=True):
    """A part of a step.

    Attributes:
        place: Location of the part.
        manifest: Its manifest.
        files: The files that the joined step takes from it.
        report: Description of the content of these files.
    """

    place: StepLocation
    manifest: Manifest
    files: Mapping[str, FileEntry]
    report: bytes


async def read_part(place: StepLocation, step: int, process: int, count: int) -> JoinPart:
    """Read the data that a join needs of a part.

    Args:
        place: Location of the part.
        step: The step.
        process: Number of the part.
        count: Number of parts.

    Raises:
        StepNotFoundError: The part is gone.
        CorruptCheckpointError: The part is damaged, or is another part.
        UnsupportedFormatError: The part has a later format.
        StorageError: The storage refused.
    """
    manifest = await read_manifest(place.storage, place.name, step=step)
    where = f"{place.location}/{PART_FILE}"
    entry = manifest.files.get(PART_FILE)
    if entry is None or not manifest.save:
        raise CorruptCheckpointError(
            f"{where} is missing: {place.location} is not a part that can be joined with others"
        )
    data = await place.storage.read(files_folder(place.name, manifest), PART_FILE, MAX_BYTES)
    if data is None or digest(data) != entry.digest:
        raise CorruptCheckpointError(f"{where} is damaged, so the step cannot be joined")
    part = decode_part(data, where)
    if (part.process, part.count) != (process, count):
        raise CorruptCheckpointError(
            f"{where} is part {part.process} of {part.count}; expected part {process} of {count}"
        )
    # The part file still names items that were deleted since.
    dropped = {each.item for each in manifest.dropped}
    wanted = [path for path in part.files if path.partition("/")[0] not in dropped]
    unknown = [path for path in wanted if path not in manifest.files]
    if unknown:
        raise CorruptCheckpointError(f"{where} names {unknown[0]!r:.200}, which the part lacks")
    files = {path: manifest.files[path] for path in wanted}
    return JoinPart(place, manifest, files, part.report)


async def save_at(storage: Storage, step_dir: str) -> str:
    """Return the id of the save in a step directory; empty if it has none, or there is no step."""
    (head,) = await storage.read_each([step_dir], FILE_NAME, MAX_BYTES, HEAD_BYTES, peek)
    return "" if head is None else head.save


class PartTransfer:
    """What the agents of all parts do alike; the leader and the followers are such agents."""

    def __init__(self, route: DrainRoute, pace: Pace, process: int, count: int) -> None:
        """Bring the part of process `process`, one of `count`."""
        self._route = route
        self._pace = pace
        self._process, self._count = process, count
        self._notes = JoinNotes(route.target)

    async def _save_of(self, step: int, save: str) -> str:
        """Return the save of a step at the source; if that cannot be read, `save`."""
        try:
            return await save_at(self._route.source, self._route.names.name(step)) or save
        except StorageError as error:
            logger.debug("step %d cannot be read: %s", step, error)
            return save

    async def _copy(
        self, part: JoinPart, target: StepLocation, attempt: Attempt, moved: ByteCounter
    ) -> None:
        """Copy the files of a part into an attempt."""
        with contextlib.closing(StepCopier(moved, pace=self._pace, goes_on=True)) as copier:
            await copier.copy_files(part.place, part.manifest, part.files, target, attempt)

    async def _keep_signing(self, sign: Callable[[], Awaitable[None]]) -> None:
        """Renew the sign of life of this agent by `sign`, until cancelled."""
        while True:
            await anyio.sleep(SIGN_SECONDS)
            try:
                await sign()
            except StorageError as error:
                logger.debug("a sign of life was not given: %s", error)


class JoinEndedError(CheckpointError):
    """Another agent has ended the join; carries the result."""

    def __init__(self, ended: DrainResult) -> None:
        super().__init__(ended.reason or ended.outcome)
        self.ended = ended


def result_of_error(error: CheckpointError, step: int, source: StepLocation) -> DrainResult:
    """Return the result of a join that ends with this error, which no storage raised."""
    if isinstance(error, JoinEndedError):
        return error.ended
    if isinstance(error, StepNotFoundError):
        reason = f"{source.location} was deleted before it was copied"
        return DrainResult(step, "deleted", reason=reason)
    outcome: Outcome = "blocked" if isinstance(error, StepExistsError) else "damaged"
    return DrainResult(step, outcome, reason=error.message)
