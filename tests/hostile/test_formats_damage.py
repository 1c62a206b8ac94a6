"""Compressed chunks that were damaged, that do not fit the budget, and saves that are cancelled."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt import ArrayFormat, Blosc, Zstd
from ckpt._engine.codecs import encode_chunk
from ckpt._format.leaf_table import LeafEntry
from ckpt._format.manifest import ItemEntry, decode
from tests.support.manifests import change_leaf, document_of, rewrite, spread
from tests.support.trees import assert_same

# -- damage ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["zstd", "blosc"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "x"
    values = np.cumsum(np.random.default_rng(0).standard_normal(300_000))
    state = {"large": values.astype(np.float32), "other": np.arange(200_000)}
    formats = {"**": ArrayFormat(compression=request.param, chunk_bytes=1 << 17)}
    ckpt.sync.save(path, state, formats=formats)
    return path


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "x"))


def item_of(path: Path) -> ItemEntry:
    return decode((path / "ckpt.json").read_bytes(), where="x").items["default"]


def leaf_of(path: Path, name: str) -> LeafEntry:
    return next(leaf for leaf in item_of(path).leaves if leaf.name == name)


def place_of(path: Path, name: str, number: int) -> tuple[Path, int, int]:
    item, leaf = item_of(path), leaf_of(path, name)
    file = item.data_files[leaf.files[number] if leaf.files else 0]
    return path / "default" / file, leaf.offsets[number], leaf.lengths[number]


def test_no_flipped_bit_of_an_encoded_chunk_changes_a_value_silently(copy: Path) -> None:
    file, offset, length = place_of(copy, "large", 2)
    data = file.read_bytes()
    expected = ckpt.sync.load(copy)
    noticed = 0
    places = np.random.default_rng(2).integers(offset * 8, (offset + length) * 8, 40)
    for bit in [*places, *range(offset * 8, (offset + 16) * 8, 5)]:
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << (bit % 8)
        file.write_bytes(broken)
        try:
            assert_same(ckpt.sync.load(copy), expected)
        except ckpt.errors.CorruptCheckpointError as error:
            noticed += error.leaf == "large"
        file.write_bytes(data)
    assert noticed > 50
    # What is not damaged can still be had.
    file.write_bytes(data[: offset + length // 2] + bytes(len(data) - offset - length // 2))
    with pytest.raises(ckpt.errors.CorruptCheckpointError) as caught:
        ckpt.sync.load(copy, {"large": np.empty(300_000, np.float32), "other": ...})
    assert caught.value.leaf == "large"


@pytest.mark.parametrize("how", ["gone", "cut", "zeros", "ones"])
def test_lost_encoded_bytes_are_noticed(copy: Path, how: str) -> None:
    file, offset, length = place_of(copy, "large", 0)
    data = file.read_bytes()
    if how == "gone":
        file.unlink()
    else:
        rest = {
            "cut": b"",
            "zeros": bytes(len(data) - offset - 100),
            "ones": b"\xff" * (len(data) - offset - 100),
        }[how]
        file.write_bytes(data[: offset + 100] + rest)
    with pytest.raises(ckpt.errors.CorruptCheckpointError) as caught:
        ckpt.sync.load(copy)
    assert caught.value.leaf in ("large", "other")
    assert length > 100


def with_leaf(path: Path, number: int, **changes: Any) -> None:
    """Rewrite the manifest: a leaf says something else, and all checksums fit."""
    document = spread(document_of(path))
    change_leaf(document["items"]["default"], number, **changes)
    rewrite(path, document)


@pytest.mark.parametrize(
    "changes",
    [
        {"codec": "gzip"},
        {"codec": None},
        {"lengths": [0] * 10},
        {"lengths": [1 << 40] * 10},
        {"lengths": [-5] * 10},
        {"lengths": [1 << 62] * 10},
        {"lengths": [-(1 << 63)] * 10},
        {"packed": True},
        {"codec": "zstd", "packed": True, "digests": ["1" * 32], "chunks": [300_000], "count": 1,
         "lengths": [9], "offsets": [0]},
    ],
)  # fmt: skip
def test_a_leaf_that_contradicts_itself_is_refused(copy: Path, changes: dict[str, Any]) -> None:
    with_leaf(copy, 0, **changes)
    with pytest.raises(ckpt.errors.CorruptCheckpointError) as caught:
        ckpt.sync.load(copy)
    assert caught.value.leaf == "large"


@pytest.mark.parametrize(
    "changes",
    [{"lengths": []}, {"lengths": [1]}, {"offsets": []}, {"digests": []}, {"offsets": [-1] * 10}],
)
def test_columns_that_contradict_each_other_are_refused(
    copy: Path, changes: dict[str, Any]
) -> None:
    with_leaf(copy, 0, **changes)
    with pytest.raises(ckpt.errors.CorruptCheckpointError):
        ckpt.sync.load(copy)


def test_encoded_chunks_need_lengths(copy: Path) -> None:
    document = spread(document_of(copy))
    del document["items"]["default"]["leaves"]["lengths"]
    rewrite(copy, document)
    with pytest.raises(ckpt.errors.CorruptCheckpointError) as caught:
        ckpt.sync.load(copy)
    assert caught.value.leaf == "large"


def test_a_chunk_that_is_said_to_be_of_another_codec_is_refused(copy: Path) -> None:
    codec = leaf_of(copy, "large").codec
    with_leaf(copy, 0, codec={"zstd": "blosc", "blosc": "zstd"}[codec or ""])
    with pytest.raises(ckpt.errors.CorruptCheckpointError) as caught:
        ckpt.sync.load(copy)
    assert caught.value.leaf == "large"


BOMB = """
import resource, sys
from pathlib import Path
import numpy as np, ckpt
peak = lambda: int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
like = {"large": np.empty(300_000, np.float32), "other": ...}
# What is loaded and started by a first restore is no part of it.
ckpt.sync.load(sys.argv[1], {"large": ..., "other": np.empty(200_000, np.int64)})
before = peak()
try:
    ckpt.sync.load(sys.argv[1], like)
except ckpt.errors.CorruptCheckpointError as error:
    print(error.leaf, (peak() - before) // 1024)
"""


def test_an_encoded_bomb_takes_no_more_memory_than_a_chunk(copy: Path) -> None:
    """What would decode to 256 MiB is refused before it has done so."""
    file, _, _ = place_of(copy, "large", 0)
    known = leaf_of(copy, "large")
    codecs: dict[str, Any] = {"zstd": Zstd(), "blosc": Blosc(cname="zstd", clevel=9)}
    bomb = encode_chunk(np.zeros(1 << 28, np.uint8), codecs[known.codec or ""], 4)
    # Behind all that is there; the manifest says that it is the leaf's first chunk.
    data = file.read_bytes()
    file.write_bytes(data + bomb)
    with_leaf(
        copy,
        0,
        offsets=[len(data), *known.offsets[1:]],
        lengths=[len(bomb), *known.lengths[1:]],
    )
    done = subprocess.run(
        [sys.executable, "-c", BOMB, str(copy)], capture_output=True, text=True, check=True
    )
    leaf, grown = done.stdout.split()
    assert leaf == "large"
    assert int(grown) < 128


# -- memory and cancellation ----------------------------------------------------------------------

MEMORY = """
import sys
from pathlib import Path
import numpy as np, ckpt
MIB = 1 << 20
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) >> 10
random = np.random.default_rng(0)
def state(mib):
    return {f"w{n}": random.integers(0, 256, (mib // 4, MIB), np.uint8) for n in range(4)}
budget, codec, root = int(sys.argv[1]) * MIB, sys.argv[2], sys.argv[3]
formats = {"**": ckpt.ArrayFormat(compression=codec)}
staging = ckpt.Staging(budget_bytes=budget)
# What is loaded and started by a first save is no staging memory.
ckpt.sync.save(f"{root}/first", {"w": np.ones(MIB)}, formats={"w": formats["**"]}, staging=staging)
tree = state(256)
before = peak()
ckpt.sync.save(f"{root}/second", tree, formats=formats, staging=staging)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["zstd", "blosc"])
def test_data_that_cannot_be_compressed_is_saved_within_the_budget(
    tmp_path: Path, codec: str
) -> None:
    budget = 64
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(budget), codec, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    # A few megabytes are threads' stacks and what allocators keep.
    assert int(done.stdout) < budget + 16


@pytest.mark.parametrize("phase", ["encode", "write"])
def test_a_save_cancelled_while_it_encodes_leaves_nothing(tmp_path: Path, phase: str) -> None:
    state = {"w": np.random.default_rng(0).standard_normal((64, 1 << 16))}
    commits: list[ckpt.Commit] = []

    def cancel(event: ckpt.types.Event) -> None:
        if event.phase == phase and commits:
            commits[0].cancel()

    staging = ckpt.Staging(budget_bytes=64 << 20)
    formats = {"w": ArrayFormat(compression="zstd")}
    root = tmp_path / "run"
    with ckpt.sync.CheckpointManager(
        root, staging=staging, formats=formats, observers=[cancel]
    ) as manager:
        commits.append(manager.save(1, state))
        with pytest.raises(ckpt.errors.CommitCancelledError):
            commits[0].result()
        assert manager.all_steps() == []
        assert [path.name for path in root.iterdir()] == []
        assert manager._service.engine.arena.used == 0
        commits.clear()
        # And the next one has all the memory it needs.
        manager.save(2, state).result()
        assert_same(manager.restore(), state)
