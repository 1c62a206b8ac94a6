"""Protocol buffers: real messages, and programs without protobuf."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, struct_pb2, timestamp_pb2

import ckpt
from ckpt import errors


def message() -> struct_pb2.Struct:
    made = struct_pb2.Struct()
    made.update({"z": 1.5, "a": {"b": [None, True, "x"]}})
    return made


def test_a_message_comes_back_by_class_by_object_and_by_its_name(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", message())
    other = struct_pb2.Struct()
    for like in (struct_pb2.Struct, other, None):
        found = ckpt.sync.load(tmp_path / "x", like)
        assert type(found) is struct_pb2.Struct
        assert found == message()
    assert other == struct_pb2.Struct()


def test_another_message_is_a_mismatch(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", message())
    others: list[Any] = [timestamp_pb2.Timestamp, timestamp_pb2.Timestamp(), {}, int]
    for like in others:
        with pytest.raises(errors.TargetMismatchError, match=r"google\.protobuf\.Struct"):
            ckpt.sync.load(tmp_path / "x", like)


def test_a_message_without_its_required_fields_is_refused(tmp_path: Path) -> None:
    option = descriptor_pb2.UninterpretedOption()
    option.name.add()
    with pytest.raises(errors.InvalidArgumentError, match="name_part"):
        ckpt.sync.save(tmp_path / "x", option)
    assert list(tmp_path.iterdir()) == []


def run(program: str, path: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        env=os.environ | {"PYTHONPATH": str(Path(ckpt.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_nothing_is_imported_to_load_a_message(tmp_path: Path) -> None:
    """Neither protobuf nor the module of the message; the error says what to do."""
    ckpt.sync.save(tmp_path / "x", items={"message": message(), "tree": {"a": 1}})
    program = """
import sys, ckpt
path = sys.argv[1]
def attempt():
    try:
        ckpt.sync.load(path)
    except ckpt.errors.InvalidArgumentError as error:
        assert "google.protobuf.Struct" in str(error) and "import" in str(error), error
    else:
        raise AssertionError("found")
attempt()
assert ckpt.sync.load(path, items=["tree"]) == {"tree": {"a": 1}}
assert not [name for name in sys.modules if name.startswith("google.protobuf")]
import google.protobuf.timestamp_pb2
attempt()
assert "google.protobuf.struct_pb2" not in sys.modules
import google.protobuf.struct_pb2
print(ckpt.sync.load(path)["message"]["z"])
"""
    assert run(program, tmp_path / "x") == "1.5"
