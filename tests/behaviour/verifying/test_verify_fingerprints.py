"""`verify` compares the fingerprints of whole arrays, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import ckpt
from ckpt._vitals.fingerprint import BoxFingerprint
from ckpt._vitals.signs import box_signs
from ckpt.manifest import decode, encode
from tests.support.signed_leaves import signed, signs_of_leaves

RNG = np.random.default_rng(0)
STATE = {
    "small": RNG.standard_normal((9, 5)).astype(np.float32),
    "odd": RNG.integers(0, 255, (1009, 1013), np.uint8),
    "large": RNG.standard_normal((1_500_000,)).astype(np.float32),
    "chunks": RNG.standard_normal((700, 900)).astype(np.float32),
}
FORMATS = {"chunks": ckpt.ArrayFormat(chunk_bytes=100_000, split_axes=(1,))}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    ckpt.sync.save(
        tmp_path / "a", STATE, formats=FORMATS, extensions=[ckpt.extensions.VitalSigns()]
    )
    return tmp_path / "a"


def change_signs(path: Path, name: str, **changes: Any) -> None:
    """Change the vital signs of a leaf in the manifest, whose checksums then fit."""
    file = path / "ckpt.json"
    manifest = decode(file.read_bytes(), where=str(file))
    item = manifest.items["default"]
    signs = [
        replace(each, **changes) if each and leaf.name == name else each
        for leaf, each in zip(item.leaves, signs_of_leaves(item.leaves), strict=True)
    ]
    items = {"default": replace(item, leaves=signed(item.leaves, signs))}
    file.write_bytes(encode(replace(manifest, items=items)))


def test_what_a_save_has_noted_is_right(saved: Path) -> None:
    assert ckpt.sync.verify(saved).problems == ()


@pytest.mark.parametrize("name", STATE)
def test_a_fingerprint_that_does_not_fit_right_bytes_is_reported(saved: Path, name: str) -> None:
    change_signs(saved, name, fingerprint="0123456789abcdef")
    [problem] = ckpt.sync.verify(saved).problems
    assert (problem.file, problem.item, problem.leaf) == ("ckpt.json", "default", name)
    assert "0123456789abcdef" in problem.message


def test_damaged_bytes_are_reported_once(saved: Path) -> None:
    change_signs(saved, "large", fingerprint="0123456789abcdef")
    manifest = decode((saved / "ckpt.json").read_bytes(), where="")
    item = manifest.items["default"]
    leaf = next(leaf for leaf in item.leaves if leaf.name == "large")
    file = saved / "default" / item.data_files[leaf.files[0] if leaf.files else 0]
    data = bytearray(file.read_bytes())
    data[leaf.offsets[0] + 100] ^= 1
    file.write_bytes(data)
    [problem] = ckpt.sync.verify(saved).problems
    assert (problem.file == "ckpt.json", problem.leaf) == (False, "large")


@pytest.mark.parametrize("step", [1, 7, 4096, 99_999, 1 << 22])
def test_a_fingerprint_may_be_taken_byte_by_byte(step: int) -> None:
    array = STATE["odd"][5:-3, 2:] if step < 99 else STATE["odd"]
    array = np.ascontiguousarray(array[:20] if step < 9 else array)
    raw = array.reshape(-1)
    whole = box_signs(raw, (5, 2), array.shape, array.dtype, len)
    taken = BoxFingerprint((5, 2), array.shape, 1)
    for start in range(0, len(raw), step):
        taken.update(raw[start : start + step].data)
    assert taken.sums() == tuple(whole["fingerprint"].tolist())
