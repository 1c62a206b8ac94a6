"""The notes that agents leave for each other: their names and contents."""

from __future__ import annotations

from typing import get_args

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ckpt._tiers.drains.drain import DrainResult, Outcome
from ckpt._tiers.drains.join_notes import (
    PARTS,
    JoinInProgress,
    JoinState,
    Kind,
    PartNote,
    decode_refusal,
    decode_state,
    encode,
    part_note,
    save_of,
    state_name,
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
    assert save_of(note_parts(state_name(save))[1]) == save


@given(st.text(max_size=60))
def test_what_others_leave_there_is_no_note(file: str) -> None:
    note = part_note(file)
    assert note is None or note.name.count(".") == file.count(".") + 1


results = st.builds(
    DrainResult,
    st.integers(0, 2**31),
    st.sampled_from(get_args(Outcome)),
    reason=st.none() | st.text(),
    save=st.text(),
)


@given(st.one_of(st.from_type(JoinInProgress), results))
def test_what_a_lead_says_is_read(state: JoinState) -> None:
    # As a store renews it.
    assert decode_state(encode(state) + b" \t ") == state


@given(st.binary())
def test_a_note_that_cannot_be_read_is_no_error(data: bytes) -> None:
    decode_state(data)
    assert isinstance(decode_refusal(data), DrainResult)


def test_a_refusal_is_read() -> None:
    refused = DrainResult(4, "damaged", reason="because")
    assert decode_refusal(msgspec.json.encode(refused)) == refused
    assert decode_state(None) is None
