"""TensorStore copies what it has read while it keeps the interpreter lock: never much at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt.storage._local import tensorstore_files

PIECE = 4 << 20


def test_a_large_part_of_a_file_is_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(range(251)) * (3 * PIECE // 251)
    (tmp_path / "file").write_bytes(data)
    read: list[int] = []
    real = tensorstore_files._request

    def request(path: Path, call: Callable[[Any], Any]) -> Any:
        result = real(path, call)
        read.append(len(result.value))
        return result

    monkeypatch.setattr(tensorstore_files, "_request", request)
    target = memoryview(bytearray(2 * PIECE + 100))
    tensorstore_files.read_block(tmp_path, "file", 77, target)
    assert target == data[77 : 77 + len(target)]
    assert read == [PIECE, PIECE, 100]
