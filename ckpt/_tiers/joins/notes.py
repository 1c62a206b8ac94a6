"""What keepers tell each other through notes of the root: their names and contents. Pure.

The leader says `Led` or `Ended` in `.ckpt-joins/SAVE.lead`. The keeper of part N answers in the
folder `.ckpt-join-parts`:

- `SAVE.ATTEMPT.N.alive`: it writes its files into this attempt.
- `SAVE.ATTEMPT.N.done`: they are all there. The note is the report of the part.
- `SAVE.ATTEMPT.N.again`: it cannot go on in this attempt.
- `SAVE.-.N.refused`: the part will not come; the note is a `Refusal`.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, cast

import msgspec
from msgspec import Struct

from ckpt._format.manifest_head import INVALID
from ckpt._tiers.drains.drain import Outcome

LEADS, PARTS = ".ckpt-joins", ".ckpt-join-parts"
_LEAD = ".lead"
# In place of an attempt: a refusal is of all of them.
_ANY = "-"

Kind = Literal["alive", "done", "again", "refused"]
_KINDS = ("alive", "done", "again", "refused")


class Led(Struct, frozen=True, tag="led"):
    """A step is being joined.

    Attributes:
        step: The step.
        step_dir: The name of its directory in the root.
        attempt: The attempt that all write into.
        count: How many parts there are.
        sign: Another number every few seconds: the leader is alive.
    """

    step: int
    step_dir: str
    attempt: str
    count: int
    sign: int = 0


class Ended(Struct, frozen=True, tag="ended"):
    """What has become of a step.

    Attributes:
        step: The step.
        outcome: As in `Drained`.
        reason: Why the root does not have it, or None.
    """

    step: int
    outcome: Outcome
    reason: str | None = None

    @property
    def is_safe(self) -> bool:
        """Whether the root has it."""
        return self.outcome in ("copied", "there")


class Refusal(Struct, frozen=True):
    """A part that will not come.

    Attributes:
        outcome: What has become of it, as in `Drained`.
        reason: Why, or None.
    """

    outcome: Outcome
    reason: str | None = None


Lead: TypeAlias = Led | Ended
_LEADS = msgspec.json.Decoder(Lead)
_REFUSALS = msgspec.json.Decoder(Refusal)


class PartNote(Struct, frozen=True):
    """The name of a note of a part.

    Attributes:
        save: The save that the part is of.
        attempt: The attempt; empty for a refusal.
        process: The number of the part.
        kind: What the note says.
    """

    save: str
    attempt: str
    process: int
    kind: Kind

    @property
    def name(self) -> str:
        """Folder and name."""
        return f"{PARTS}/{self.save}.{self.attempt or _ANY}.{self.process}.{self.kind}"


def part_note(file: str) -> PartNote | None:
    """Return the note that has this name in its folder; None if it is of something else."""
    fields = file.split(".")
    if len(fields) != len(PartNote.__struct_fields__):
        return None
    save, attempt, process, kind = fields
    if kind not in _KINDS or not (process.isascii() and process.isdigit()):
        return None
    return PartNote(save, "" if attempt == _ANY else attempt, int(process), cast("Kind", kind))


def lead_name(save: str) -> str:
    """Return folder and name of the note about a save."""
    return f"{LEADS}/{save}{_LEAD}"


def save_of(file: str) -> str | None:
    """Return the save that a note of this name in the folder of leads is about."""
    return file.removesuffix(_LEAD) if file.endswith(_LEAD) else None


def encoded(record: Lead | Refusal) -> bytes:
    """Return the content of a note."""
    return msgspec.json.encode(record)


def lead_of(data: bytes | None) -> Lead | None:
    """Return what a lead says; None if there is none, or it cannot be read."""
    try:
        return None if data is None else _LEADS.decode(data)
    except INVALID:
        return None


def refusal_of(data: bytes | None) -> Refusal:
    """Return what a refusal says, also if it cannot be read."""
    try:
        return _REFUSALS.decode(data or b"")
    except INVALID:
        return Refusal("damaged", "its note cannot be read")
