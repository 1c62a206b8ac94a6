"""What every error of the library can be asked, and told."""

from __future__ import annotations

import pytest

from ckpt.errors import CheckpointError, StorageError, located


def test_where_it_happened() -> None:
    error = CheckpointError("It is full.", leaf="params.w")
    assert (error.message, error.step, error.item, error.leaf) == (
        *("It is full.", None, None, "params.w"),
    )
    error.locate(step=3, item="model", leaf="other")
    assert (error.step, error.item, error.leaf) == (3, "model", "params.w")
    assert str(error) == "step 3, item 'model', leaf 'params.w': It is full."
    unknown = CheckpointError("It is full.")
    unknown.locate(leaf="params.b")
    assert unknown.leaf == "params.b"


def test_notes_have_no_secrets() -> None:
    error = CheckpointError("It is full.")
    error.add_note("see s3://user:secret@host/bucket")
    (note,) = error.__notes__
    assert note.startswith("see s3://")
    assert "secret" not in note


def test_several_at_once_are_one() -> None:
    first, second = StorageError("no room"), StorageError("no rights")
    with (
        pytest.raises(StorageError, match="no room") as caught,
        located(step=5, item="model", leaf="w"),
    ):
        raise ExceptionGroup("both", [first, second])
    assert (caught.value.step, caught.value.item, caught.value.leaf) == (5, "model", "w")
    assert caught.value.others == (second,)
    assert "no rights" in "".join(caught.value.__notes__)
