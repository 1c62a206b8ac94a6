"""Steps whose parts are on several disks, and the notes on their leaves. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import Struct, convert, to_builtins
from msgspec.structs import asdict
from msgspec.structs import replace as replaced

from ckpt._steps.index import IndexedStep
from ckpt.keep._questions import LeafNotes, SavedStep, notes_on_all


class CommonSteps(Struct, frozen=True):
    """The steps that all processes have, by number, ascending.

    Attributes:
        own: The steps as they are on the disk of this process.
        everywhere: The same steps, with the notes of all disks; these name no leaves.
    """

    own: dict[int, IndexedStep]
    everywhere: dict[int, IndexedStep]


def common_steps(found: Mapping[int, IndexedStep], every: Sequence[Any]) -> CommonSteps:
    """Return the steps that all processes have published, with parts of the same save.

    Args:
        found: The steps on the disk of this process.
        every: For each disk, the number, the save and the notes of every step.
    """
    disks = [{(step, save): LeafNotes(*notes) for step, save, notes in steps} for steps in every]
    common = [key for key in sorted(set.intersection(*map(set, disks))) if key[1]]
    everywhere = {
        key[0]: replaced(found[key[0]], notes=notes_on_all([disk[key] for disk in disks]))
        for key in common
    }
    return CommonSteps({step: found[step] for step in everywhere}, everywhere)


def notes_data(own: Sequence[SavedStep]) -> Any:
    """Return the JSON value that tells other processes about the leaves of this one's steps.

    Equal notes are sent once: a run that has diverged has the same odd leaves in every step.
    """
    numbers: dict[LeafNotes, int] = {}
    notes = [convert(each, LeafNotes, from_attributes=True) for each in own]
    steps = [numbers.setdefault(each, len(numbers)) for each in notes]
    return [to_builtins(list(numbers)), steps]


def join_notes(own: Sequence[SavedStep], every: Sequence[Any]) -> list[SavedStep]:
    """Return steps with the notes of all disks: the same on every process.

    Args:
        own: The steps, as they are on the disk of this process.
        every: The `notes_data` of every process about the same steps.
    """
    disks = [(convert(told, list[LeafNotes]), steps) for told, steps in every]
    return [
        replace(step, **asdict(notes_on_all([notes[steps[at]] for notes, steps in disks])))
        for at, step in enumerate(own)
    ]
