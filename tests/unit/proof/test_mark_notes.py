"""Notes with marks: what was torn is passed over, and each run is compared with the right one."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt._proof.mark_notes import (
    FOLDER,
    MOST_NOTES,
    decode_marks,
    encode_marks,
    marks_of_run_before,
    prune,
    read_marks,
)
from ckpt._proof.state_marks import MARK, StateLayout, StateMark
from ckpt.errors import CorruptCheckpointError
from ckpt.storage import open_root
from ckpt.storage._base import Storage

LAYOUT = StateLayout(("params.w", "step"), ("float32[8, 4]", "int64[]"))


def mark(step: int, seed: int = 0) -> StateMark:
    rng = np.random.default_rng([seed, step])
    data = rng.integers(0, 256, 2 * MARK.itemsize, np.uint8).tobytes()
    return StateMark(step, LAYOUT, np.frombuffer(data, MARK))


def as_tuple(mark: StateMark) -> tuple[int, StateLayout, bytes]:
    return mark.step, mark.layout, mark.leaves.tobytes()


@given(st.lists(st.integers(0, 10**19 - 1), min_size=1, max_size=5), st.integers(0, 9))
def test_marks_are_read_as_they_were_written(steps: list[int], seed: int) -> None:
    marks = [mark(step, seed) for step in steps]
    assert list(map(as_tuple, decode_marks(encode_marks(marks), "it"))) == list(
        map(as_tuple, marks)
    )


NOTE = encode_marks([mark(1), mark(2)])


@given(st.integers(0, len(NOTE) - 1))
def test_a_note_that_was_cut_is_not_read(length: int) -> None:
    with pytest.raises(CorruptCheckpointError, match="here cannot be read"):
        decode_marks(NOTE[:length], "here")


@given(st.integers(0, len(NOTE) - 1), st.integers(1, 255))
def test_a_note_that_was_changed_is_not_read(at: int, change: int) -> None:
    data = bytearray(NOTE)
    data[at] ^= change
    with pytest.raises(CorruptCheckpointError, match="here cannot be read"):
        decode_marks(bytes(data), "here")


async def put(storage: Storage, name: str, *steps: int) -> None:
    data = encode_marks([mark(step) for step in steps])
    await storage.put_note(f"{FOLDER}/{name}", data, replace=True)


@pytest.mark.anyio
async def test_notes_are_read_by_run_and_the_oldest_go(
    caplog: pytest.LogCaptureFixture,
) -> None:
    storage = open_root("memory://marks/read")
    for number in range(MOST_NOTES + 3):
        await put(storage, f"{number:020d}-{'a' if number < 60 else 'b'}", number)
    await storage.put_note(f"{FOLDER}/{99:020d}-c", b"torn", replace=True)
    runs = await read_marks(storage)
    assert [sorted(marks) for marks in runs] == [[*range(4, 60)], [*range(60, MOST_NOTES + 3)]]
    await prune(storage)
    assert len(await storage.notes(FOLDER)) == MOST_NOTES
    (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert f"{99:020d}-c" in record.getMessage()


def run(first: int, last: int) -> dict[int, StateMark]:
    return {step: mark(step) for step in range(first, last + 1)}


@pytest.mark.parametrize(
    ("runs", "step", "expected"),
    [
        ([], 0, None),
        # A run that begins after all marks, or before them, repeats nothing.
        ([(0, 9)], 10, None),
        ([(5, 9)], 3, None),
        ([(0, 9)], 5, 0),
        # The second one resumed, too, so it may be wrong in the same way.
        ([(0, 9), (5, 20)], 5, 0),
        # The second one came through the step, so it has saved the checkpoint before it.
        ([(0, 20), (5, 20)], 15, 1),
        ([(0, 20), (5, 20), (15, 30)], 15, 1),
        # It begins anew, perhaps as another program.
        ([(0, 3), (0, 2)], 0, None),
    ],
)
def test_a_run_repeats_the_one_that_it_goes_on_from(
    runs: list[tuple[int, int]], step: int, expected: int | None
) -> None:
    marks = [run(*each) for each in runs]
    found = marks_of_run_before(marks, step)
    assert found is ({} if expected is None else marks[expected]) or (
        expected is None and not found
    )
