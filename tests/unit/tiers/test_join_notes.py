"""The notes that keepers leave for each other: their names and contents."""

from __future__ import annotations

from typing import get_args

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ckpt._tiers.joins.notes import (
    PARTS,
    Ended,
    Kind,
    Lead,
    Led,
    PartNote,
    Refusal,
    encoded,
    lead_name,
    lead_of,
    part_note,
    refusal_of,
    save_of,
)
from ckpt.storage._base import note_parts

IDS = st.text("0123456789abcdef", min_size=32, max_size=32)
PROCESSES = st.integers(0, 10**6)


@given(IDS, st.one_of(st.just(""), IDS), PROCESSES, st.sampled_from(get_args(Kind)))
def test_a_note_is_known_by_its_name(save: str, attempt: str, process: int, kind: Kind) -> None:
    note = PartNote(save, attempt, process, kind)
    folder, file = note_parts(note.name)
    assert (folder, part_note(file)) == (PARTS, note)


@given(IDS)
def test_a_lead_is_known_by_its_name(save: str) -> None:
    assert save_of(note_parts(lead_name(save))[1]) == save


@given(st.text(max_size=60))
def test_what_others_leave_there_is_no_note(file: str) -> None:
    note = part_note(file)
    assert note is None or note.name.count(".") == file.count(".") + 1


@given(st.one_of(st.from_type(Led), st.from_type(Ended)))
def test_what_a_lead_says_is_read(lead: Lead) -> None:
    # As a store renews it.
    assert lead_of(encoded(lead) + b" \t ") == lead


@given(st.binary())
def test_a_note_that_cannot_be_read_is_no_error(data: bytes) -> None:
    lead_of(data)
    assert isinstance(refusal_of(data), Refusal)


def test_a_refusal_is_read() -> None:
    refused = Refusal("damaged", "because")
    assert refusal_of(msgspec.json.encode(refused)) == refused
    assert lead_of(None) is None
