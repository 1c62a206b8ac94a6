"""`ckpt explain`: the dry run of a restore."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

import ckpt
from tests.support.command import (
    check_golden,
    environment,
    in_this_process,
    on_terminal,
    settled,
    without_styles,
)

Capsys = pytest.CaptureFixture[str]
MIB = 1 << 20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of large arrays that were cut into rows, and small ones."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    layers = [
        {"kernel": jax.device_put(np.ones((512, 1024), np.float32), rows), "bias": np.ones(8)}
        for _ in range(12)
    ]
    found = tmp_path_factory.mktemp("explain") / "final"
    ckpt.sync.save(found, {"layers": layers})
    return found


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("mesh", [None, "data=2"], ids=["as_saved", "mesh"])
def test_output(mesh: str | None, as_json: bool, run_root: Path, capsys: Capsys) -> None:
    arguments = ["--budget", "1MiB", *(["--json"] if as_json else [])]
    arguments += [] if mesh is None else ["--mesh", mesh, "--processes", "2"]
    ran = in_this_process(capsys, "explain", run_root, *arguments)
    assert (ran.status, ran.err) == (0, "")
    text = settled(ran.out, root=run_root)
    # It depends on the number of processors.
    text = re.sub(r'\d+ requests at a time|"concurrent":\d+', "<concurrent>", text)
    name = "explain_as_saved" if mesh is None else "explain_mesh"
    check_golden(f"{name}_json" if as_json else name, text)


def test_it_says_who_reads_what_and_which_chunks_cost_most(path: Path, capsys: Capsys) -> None:
    arguments = ("--mesh", "model=2,expert=2", "--processes", "4", "--shard", "**.kernel=-,model")
    ran = in_this_process(capsys, "explain", path, *arguments)
    assert (ran.status, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0] == (
        f"{path}, onto model=2, expert=2: 24 arrays, 24 MiB, on 4 cpu devices in 4 processes"
    )
    assert lines[1].startswith("reads 96 MiB in ")
    # Each process needs half of every kernel, and reads all of it.
    table = [re.split(r" {2,}", line.strip()) for line in lines]
    (process,) = (row for row in table if row[0] == "0 to 3")
    assert process[1:4] == ["1", "12 MiB", "24 MiB"]
    assert ["layers.0.kernel", "4 MiB", "8 MiB", "2", "[128, 1024]", "[512, 512]"] in table
    assert "and 2 more, in --json" in lines
    (layout,) = (line for line in lines if line.startswith("advice: save with "))
    assert "formats={'layers.*.kernel': ckpt.ArrayFormat(chunk_bytes=" in layout
    assert layout.endswith("and 48 MiB less is read of 12 arrays")
    (shared,) = (line for line in lines if "broadcast_bytes=" in line)
    assert shared.endswith("48 MiB in all")


def test_json_has_a_record_for_every_process_and_array(path: Path, capsys: Capsys) -> None:
    arguments = ("--mesh", "model=4", "--processes", "2", "--shard", "**.kernel=-,model", "--json")
    found = in_this_process(capsys, "explain", path, *arguments).json
    assert found["mesh"] == {"model": 4}
    assert [each["process"] for each in found["processes"]] == [0, 1]
    assert found["read"] == sum(each["read"] for each in found["processes"])
    assert found["requests"] == sum(each["requests"] for each in found["processes"])
    assert len(found["leaves"]) == 12
    assert all(each["amplification"] == 2 for each in found["leaves"])
    most = found["processes"][0]["most_of"]
    assert most["read"] == pytest.approx(most["share"] * (path / most["path"]).stat().st_size)


def test_an_axis_that_the_mesh_has_not_is_said_once(path: Path, capsys: Capsys) -> None:
    ran = in_this_process(capsys, "explain", path, "--mesh", "model=2")
    (note,) = (line for line in ran.out.splitlines() if line.startswith("note: "))
    assert note == (
        "note: the mesh has no axis 'data', over which 12 arrays were cut; it is left out of their "
        "specs"
    )


def test_items_without_arrays_are_named(tmp_path: Path, capsys: Capsys) -> None:
    ckpt.sync.save(tmp_path / "x", items={"model": {"w": jnp.ones(4)}, "notes": "two words"})
    out = in_this_process(capsys, "explain", tmp_path / "x").out
    assert "note: the item notes (bytes) has no arrays; its files, " in out
    out = in_this_process(capsys, "explain", tmp_path / "x", "--item", "model").out
    assert "notes" not in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--mesh", "data"], "such as data=4,model=2, not 'data'"),
        (["--mesh", "data=0"], "such as data=4,model=2"),
        (["--mesh", "data=2,data=2"], "such as data=4,model=2"),
        (["--shard", "**=data"], "--shard needs a --mesh"),
        (["--mesh", "x=2", "--shard", "**"], "such as 'params.**=data,-'"),
        (["--mesh", "x=2", "--shard", "**=x,,"], "such as 'params.**=data,-'"),
        (["--mesh", "x=2", "--shard", "**=y"], "the mesh has no axis 'y', only x"),
        (["--mesh", "x=2", "--shard", "layer.**=x"], "covers none of the 24 arrays"),
        (["--mesh", "x=2", "--processes", "3"], "2 devices cannot be divided among 3"),
        (["--mesh", "x=999999999"], "at most 65,536"),
        (["--select", "layer"], "is it 'layers'"),
        (["--item", "model"], "no item 'model'"),
        (["--budget", "5KiB"], "at least 1 MiB"),
    ],
)
def test_wrong_wishes(arguments: list[str], text: str, path: Path, capsys: Capsys) -> None:
    ran = in_this_process(capsys, "explain", path, *arguments)
    assert (ran.status, ran.out) == (2, "")
    assert text in ran.err


def test_a_mesh_that_does_not_divide_the_arrays(path: Path, capsys: Capsys) -> None:
    ran = in_this_process(capsys, "explain", path, "--mesh", "data=3")
    assert (ran.status, ran.out) == (1, "")
    (line,) = ran.err.splitlines()
    assert "12 arrays do not fit the devices" in line
    assert "layers.0.kernel: array axis 0 is partitioned 3 times" in line
    assert "; and 4 more. Give another mesh" in line


def test_a_damaged_manifest(path: Path, tmp_path: Path, capsys: Capsys) -> None:
    shutil.copytree(path, tmp_path / "x")
    manifest = tmp_path / "x" / "ckpt.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"kernel", b"kerneI", 1))
    ran = in_this_process(capsys, "explain", tmp_path / "x")
    assert (ran.status, ran.out) == (1, "")
    assert "ckpt.json" in ran.err


def test_a_virtual_step_and_a_file_of_another_library(tmp_path: Path, capsys: Capsys) -> None:
    save_file({"w": np.ones((1024, 512), np.float32)}, tmp_path / "model.safetensors")
    ckpt.sync.adopt(tmp_path / "model.safetensors", tmp_path / "runs", step=1)
    for place in (tmp_path / "runs", tmp_path / "model.safetensors"):
        arguments = ("--mesh", "x=8", "--processes", "8", "--json")
        whole = in_this_process(capsys, "explain", place, *arguments).json
        cut = in_this_process(capsys, "explain", place, *arguments, "--shard", "w=x").json
        assert whole["nbytes"] == cut["nbytes"] == 1024 * 512 * 4
        # Arrays of numpy are whole in every process, as long as nothing else is said.
        assert {each["held"] for each in whole["processes"]} == {1024 * 512 * 4}
        assert {each["held"] for each in cut["processes"]} == {128 * 512 * 4}
        assert cut["read"] <= whole["read"] == 8 * 1024 * 512 * 4


def test_it_imports_no_more_of_the_library_than_the_planner(run_root: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ckpt", "explain", str(run_root)],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in ran.stderr.splitlines()}
    assert "ckpt._plan.chunk_reads" in imported
    assert not imported & {"ckpt._engine.restore", "tensorstore", "pydantic"}


def test_no_table_is_wider_than_the_terminal(path: Path) -> None:
    status, shown = on_terminal("explain", path, "--mesh", "data=2", columns=60)
    assert status == 0
    _, table, _ = without_styles(shown).split("\n\n")
    assert max(map(len, table.splitlines())) <= 60
