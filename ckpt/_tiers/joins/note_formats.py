"""The notes of agents in the root: their names and contents. Pure.

The leader writes `JoinInProgress` or `JoinResult` to `.ckpt-joins/SAVE.lead`. The agent of part N
answers in the folder `.ckpt-join-parts`:

- `SAVE.ATTEMPT.N.alive`: it writes its files into this attempt.
- `SAVE.ATTEMPT.N.done`: all its files are there. The note is the report of the part.
- `SAVE.ATTEMPT.N.again`: it cannot go on in this attempt.
- `SAVE.-.N.refused`: the part will not come; the note is a `Refusal`.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, cast

import msgspec
from msgspec import Struct

from ckpt._format.manifest_head import INVALID
from ckpt._tiers.drains.drain import Outcome

STATES, PARTS = ".ckpt-joins", ".ckpt-join-parts"
_LEAD = ".lead"
# Stands for the attempt of a refusal, which holds for all attempts.
_ANY = "-"

Kind = Literal["alive", "done", "again", "refused"]
_KINDS = ("alive", "done", "again", "refused")


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


class JoinResult(Struct, frozen=True, tag="ended"):
    """The outcome of a join.

    Attributes:
        step: The step.
        outcome: See `DrainResult`.
        reason: Reason why the root does not have the step, or None.
    """

    step: int
    outcome: Outcome
    reason: str | None = None

    @property
    def is_safe(self) -> bool:
        """True if the root has the step."""
        return self.outcome in ("copied", "there")


class Refusal(Struct, frozen=True):
    """A part that will not come.

    Attributes:
        outcome: Outcome of the part; see `DrainResult`.
        reason: Reason for it, or None.
    """

    outcome: Outcome
    reason: str | None = None


JoinState: TypeAlias = JoinInProgress | JoinResult
_STATES = msgspec.json.Decoder(JoinState)
_REFUSALS = msgspec.json.Decoder(Refusal)


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


def encode(record: JoinState | Refusal) -> bytes:
    return msgspec.json.encode(record)


def decode_state(data: bytes | None) -> JoinState | None:
    """Return the content of a leader's note; None if there is none, or it cannot be read."""
    try:
        return None if data is None else _STATES.decode(data)
    except INVALID:
        return None


def decode_refusal(data: bytes | None) -> Refusal:
    """Return the content of a refusal, or a `damaged` refusal if it cannot be read."""
    try:
        return _REFUSALS.decode(data or b"")
    except INVALID:
        return Refusal("damaged", "its note cannot be read")
