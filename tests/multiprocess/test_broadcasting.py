"""Restores that share their reads: the right bits, each byte read once, errors for everybody."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
import ckpt.sync
from ckpt._format.manifest import decode
from tests.support.real_jobs import Result, started

LARGE = (512, 1024)
# Shape and dtype of everything that is saved; the children know it from a file.
KINDS: dict[str, tuple[tuple[int, ...], str]] = {
    "rows": (LARGE, "float32"),
    "columns": (LARGE, "float32"),
    "tiles": (LARGE, "float32"),
    "partly": ((256, 512), "int32"),
    "everywhere": (LARGE, "float32"),
    "packed": (LARGE, "float32"),
    "packed everywhere": (LARGE, "float32"),
    "small": ((8, 16), "float32"),
    "scalar": ((), "float32"),
    "keys": ((4, 2), "uint32"),
    "empty": ((8, 0), "float32"),
    "cast": (LARGE, "float32"),
    "numpy": ((300, 7), "int16"),
}
CHUNK_BYTES = 1 << 18
PHASES = ("cancelled", "plain", "awaited", "surgery", "refusals", "damaged")


def values(name: str) -> np.ndarray[Any, Any]:
    shape, dtype = KINDS[name]
    flat = np.arange(int(np.prod(shape))) % 251 + len(name)
    return flat.astype(dtype).reshape(shape)


def nbytes(*names: str) -> int:
    return sum(math.prod(KINDS[name][0]) * np.dtype(KINDS[name][1]).itemsize for name in names)


def largest_file(step: Path) -> Path:
    return max(step.glob("default/d/*"), key=lambda path: path.stat().st_size)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved by this process: whole, as two items, with a flipped byte, with a file that was cut."""
    root = tmp_path_factory.mktemp("saved")
    (root / "dtypes.json").write_text(json.dumps(KINDS))
    tree: dict[str, Any] = {name: jnp.asarray(values(name)) for name in KINDS if name != "numpy"}
    tree["keys"] = jax.random.wrap_key_data(tree["keys"])
    tree["numpy"] = values("numpy")
    formats = {
        "packed*": ckpt.ArrayFormat(compression="zstd", chunk_bytes=300_000),
        "*": ckpt.ArrayFormat(chunk_bytes=CHUNK_BYTES),
    }
    # Each has files of its own: two of them are damaged.
    place = ckpt.storage.Local(root, hard_links=False)
    with ckpt.sync.CheckpointManager(place, formats=formats) as mgr:
        for step in (1, 3, 4):
            mgr.save(step, tree)
    with ckpt.sync.CheckpointManager(root) as mgr:
        mgr.save(2, items={name: {"rows": tree["rows"]} for name in ("a", "b")})
    flipped = largest_file(root / "3")
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 1
    flipped.write_bytes(data)
    cut = largest_file(root / "4")
    os.truncate(cut, cut.stat().st_size // 2)
    return root


@pytest.fixture(scope="module")
def four(root: Path) -> list[Result]:
    """What four processes with two devices each found."""
    with started(4, "restore_broadcast.py", root, *PHASES) as job:
        results = job.results()
    for result in results:
        assert result.code == 0, result.errors
    return results


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["plain", "awaited", "surgery", "cancelled"])
def test_every_process_gets_what_it_asked_for(four: list[Result], phase: str) -> None:
    for result in four:
        value = result.value[phase]
        for told in [value[key] for key in value if key.isdecimal()] or [value]:
            assert told["problems"] == []


def test_jax_takes_what_came_for_arrays_of_all_processes(four: list[Result]) -> None:
    total = sum(values(name).astype(np.float64).sum() for name in ("everywhere", "rows"))
    for result in four:
        assert result.value["plain"]["total"] == pytest.approx(total, rel=1e-5)


def test_each_group_reads_what_it_needs_once(four: list[Result], root: Path) -> None:
    """All but those of which one process alone has a part."""
    leaves = decode((root / "1" / "ckpt.json").read_bytes(), where="").items["default"].leaves
    stored = {leaf.name: sum(leaf.lengths) for leaf in leaves if leaf.codec is not None}
    assert set(stored) == {"packed", "packed everywhere"}
    held = ("columns", "tiles", "partly", "everywhere", "small", "scalar", "keys", "cast")
    names = (*held, "numpy")
    # Chunks are rows, so that both of the groups that hold columns need them all.
    shared = nbytes(*names, "columns") + sum(stored.values())
    fetched = [result.value["plain"][str(64 << 20)]["fetched"] for result in four]
    # Compressed chunks travel as they are; a little that lies in between is read over.
    assert shared <= sum(fetched) < shared + 20_000
    # And nobody reads much more than the others.
    assert max(fetched) < 1.2 * sum(fetched) / 4


def test_memory_stays_within_the_limit(four: list[Result]) -> None:
    for result in four:
        told = result.value["plain"][str(1 << 20)]
        # A batch, and this process's shares of it and of the next one.
        assert told["largest"] * (1 + 2 / 4) <= 1 << 20
        assert told["rounds"] > result.value["plain"][str(64 << 20)]["rounds"]


def test_nobody_waits_on_the_loop_that_awaits(four: list[Result]) -> None:
    for result in four:
        assert result.value["awaited"]["beats"] > 10
        assert "MainThread" not in result.value["awaited"]["compiled"]


def test_who_is_cancelled_is_not_waited_for(four: list[Result]) -> None:
    for result in four:
        events = ["cancelled"] if result.index == 1 else ["CommitCancelledError"]
        assert result.value["cancelled"]["events"] == events


def test_what_does_not_fit_together_is_an_error_on_every_process(four: list[Result]) -> None:
    for result in four:
        told = result.value["refusals"]
        assert told["bytes"]["error"] == "CoordinationError"
        assert "give all processes the same" in told["bytes"]["text"]
        assert "broadcast_bytes=None while process 0 does with 4194304" in told["none"]["text"]
        for which in ("like", "alone", "groups"):
            assert told[which]["error"] == "CoordinationError"
            assert "give them the same like=" in told[which]["text"]
        # Told, not waited for in vain.
        assert told["seconds"] < 9
        assert told["good"] == {"problems": []}
        for given in ("True", "5", "'1 GB'", "1500000000.0"):
            assert told[given]["error"] == "InvalidArgumentError"
            wanted = "expected a whole number, 1048576 or more (1 MiB), in bytes"
            assert f"broadcast_bytes={given}: {wanted}" in told[given]["text"]


def test_damage_is_told_on_every_process_with_the_leaf(four: list[Result]) -> None:
    for result in four:
        told = result.value["damaged"]
        for step in ("3", "4"):
            assert told[step]["error"] == "CorruptCheckpointError"
            assert f"step {step}, item 'default', leaf '" in told[step]["text"]
        assert told["1"] == {"problems": []}


def test_with_two_processes_everything_replicated_is_shared(root: Path) -> None:
    with started(
        2, "restore_broadcast.py", root, "plain", devices_per_process=2, timeout=120
    ) as job:
        results = job.results()
    for result in results:
        assert result.code == 0, result.errors
        for nbytes in (64 << 20, 1 << 20):
            assert result.value["plain"][str(nbytes)]["problems"] == []


@pytest.mark.parametrize("phase", ["stops", "holds"])
def test_a_process_that_does_not_go_on_is_waited_for_in_vain_for_a_limited_time(
    root: Path, phase: str
) -> None:
    """Between two exchanges, and where all are ready to exchange but its caller is not."""
    with started(2, "restore_broadcast.py", root, phase, devices_per_process=1) as job:
        job[1].reached("exchanged once" if phase == "stops" else "is read")
        job[0].told(60)
        (told,) = job[0].values
        # Its program waits on the devices for ever.
        job[1].kill()
    assert told[phase]["error"] == "CoordinationTimeoutError"
    assert told[phase]["seconds"] < 15
    expected = "process 1 of 2" if phase == "stops" else "end all processes"
    assert expected in told[phase]["text"]


def test_without_other_processes_there_is_nothing_to_share(tmp_path: Path) -> None:
    tree = {"a": jnp.arange(1000.0)}
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, tree)
        mgr.wait_until_finished()
        found = mgr.restore(1, tree, broadcast_bytes=1 << 20)
        assert (found["a"] == tree["a"]).all()
        with pytest.raises(ckpt.errors.InvalidArgumentError, match="1048576 or more"):
            mgr.restore(1, tree, broadcast_bytes=(1 << 20) - 1)
