"""The parts of real jobs, joined: the step that the same processes save to a shared root."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace

import ckpt
import ckpt.sync
from ckpt._format.leaf_table import LeafTable
from ckpt._format.manifest import ItemEntry, Manifest
from ckpt._vitals.stored_signs import signs_in
from ckpt.errors import CoordinationError
from tests.support.databases import in_database
from tests.support.joined_steps import join
from tests.support.paths import ROOT
from tests.support.real_jobs import run_processes
from tests.support.simulated_job import FAR, closed, managers, saved, steps
from tests.support.trees import assert_same

# Of these the parts are cut as the disks hold them, whatever the first process has whole.
CUT = {"small uneven"}


@pytest.fixture(scope="module", params=[2, 4])
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps as the processes have saved them together, and as they were joined of parts."""
    root = tmp_path_factory.mktemp("job")
    run_processes(request.param, "save_both_ways.py", root, devices_per_process=2)
    for step in ("1", "2"):
        join([root / str(index) / step for index in range(request.param)], root / "joined" / step)
    return root


@pytest.fixture(params=["1", "2"])
def step(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def manifest_of(step: Path) -> Manifest:
    return ckpt.manifest.decode((step / "ckpt.json").read_bytes(), where=str(step))


def leaves_of(item: ItemEntry, without: set[str]) -> list[Any]:
    """Return what is to be the same: all but the places of chunks."""
    return [
        replace(leaf, offsets=(), files=(), lengths=())
        for leaf in item.leaves
        if leaf.name not in without
    ]


def comparable(manifest: Manifest) -> dict[str, Any]:
    found = {
        name: getattr(manifest, name)
        for name in (
            "requires",
            "step",
            "unnamed",
            "metrics",
            "metadata",
            "process_count",
            "folder",
        )
    }
    blank = LeafTable()
    items = {
        name: replace(item, leaves=blank, data_files=[]) for name, item in manifest.items.items()
    }
    return found | {"items": items}


def test_their_manifests_say_the_same(root: Path, step: str) -> None:
    shared, joined = (manifest_of(root / name / step) for name in ("shared", "joined"))
    assert comparable(joined) == comparable(shared)
    for name, item in shared.items.items():
        assert leaves_of(joined.items[name], CUT) == leaves_of(item, CUT)
    assert joined.extensions == shared.extensions
    signs = [signs_in(each.items["model"].leaves).records for each in (shared, joined)]
    assert (signs[0]["norm"] >= 0).any()
    assert np.array_equal(signs[0]["fingerprint"], signs[1]["fingerprint"])


def test_parts_of_the_second_step_share_files_with_the_first(root: Path) -> None:
    for step, is_any in (("1", False), ("2", True)):
        for place in ("0", "1", "joined"):
            files = manifest_of(root / place / step).files.values()
            assert any(file.shared for file in files) == is_any


def named(step: Path) -> Mapping[str, bytes]:
    """Return the files of a step that are not called by chance."""
    paths = [path for path in step.rglob("*") if path.is_file() and path.parent.name != "d"]
    return {str(path.relative_to(step)): path.read_bytes() for path in paths}


def test_they_have_the_same_files_for_other_readers(root: Path, step: str) -> None:
    shared, joined = (named(root / name / step) for name in ("shared", "joined"))
    assert joined.keys() == shared.keys()
    # What has its own times or random names in it, and the shapes of chunks.
    others = {"ckpt.json", "_CHECKPOINT_METADATA"}
    others |= {path for path in shared if path.endswith("manifest.ocdbt")}
    cut = {"model/_METADATA", "model/array_metadatas/process_0"}
    for path in shared.keys() - others - cut:
        assert joined[path] == shared[path], path
    documents = [json.loads(each["_CHECKPOINT_METADATA"]) for each in (shared, joined)]
    for document in documents:
        del document["init_timestamp_nsecs"], document["commit_timestamp_nsecs"]
    assert documents[0] == documents[1]
    for path in cut:
        assert json.loads(joined[path]).keys() == json.loads(shared[path]).keys()


def plain(tree: Any) -> Any:
    """Return a tree with the data of its keys."""

    def of(leaf: Any) -> Any:
        is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(leaf) if is_key else leaf

    return jax.tree.map(of, tree)


def test_it_holds_what_was_saved(root: Path, step: str) -> None:
    report = ckpt.sync.verify(root / "joined" / step)
    assert report.ok, report.problems
    # Of a function only the name is stored.
    chosen = {"optimizer": ckpt.Adapt(select=["state"])}
    items = dict.fromkeys(("model", "optimizer", "config", "notes"))
    shared, joined = (
        ckpt.sync.load(root / name / step, items=items, adapt=chosen)
        for name in ("shared", "joined")
    )
    assert_same(plain(joined), plain(shared))
    assert np.isnan(joined["optimizer"]["state"]["nu"][2])
    assert joined["model"]["tied"] is joined["model"]["rows"]


def test_each_process_finds_its_own(root: Path) -> None:
    told = []
    for place in ("shared", "joined"):
        count = manifest_of(root / place / "1").process_count
        told.append(run_processes(count, "restore_own.py", root / place, devices_per_process=2))
    shared, joined = told
    assert [each.value for each in joined] == [each.value for each in shared]
    assert [each.value["counter"] for each in joined] == list(range(len(joined)))


def test_other_readers_find_its_arrays(root: Path, step: str) -> None:
    found = root / "joined" / step
    expected = ckpt.sync.load(found, items={"model": None})["model"]
    for name, array in expected.items():
        if name == "key":
            array = jax.random.key_data(array)
        stored = in_database(found / "model", name)
        assert np.array_equal(stored, np.asarray(array)), name
    assert in_database(found / "optimizer", "state.nu.0").item() == 1


def test_it_needs_no_device(root: Path) -> None:
    """Where it is made, other programs may use the accelerators."""
    count = manifest_of(root / "joined" / "1").process_count
    parts = [str(root / str(index) / "1") for index in range(count)]
    program = (
        "import sys; from pathlib import Path; from tests.support.joined_steps import join; "
        "join([Path(each) for each in sys.argv[2:]], Path(sys.argv[1]))"
    )
    target = root / "without devices" / "1"
    environment = os.environ | {"JAX_PLATFORMS": "none", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, str(target), *parts]
    subprocess.run(command, check=True, timeout=60, env=environment, cwd=ROOT)
    assert named(target).keys() == named(root / "joined" / "1").keys()


def test_replicas_of_several_parts_are_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for told in run_processes(
        3, "save_in_job.py", "drifting_apart", tmp_path, 1, devices_per_process=1
    ):
        # A process alone sees nothing wrong.
        assert told.value == {"unequal": 0, "ok": True}
    manifest = join([tmp_path / str(index) / "1" for index in range(3)], tmp_path / "joined" / "1")
    leaves = manifest.items["default"].leaves
    unequal = signs_in(leaves).unequal
    assert {leaves.names[number]: each for number, each in unequal.items()} == {"bad": (1,)}
    assert manifest.extensions["vital_signs"]["unequal_leaves"] == 1
    assert "'bad' of 'default' (process 1)" in caplog.text
    assert ckpt.sync.verify(tmp_path / "joined" / "1").ok


# In files by their size, so in another order than in the tree; the largest has several chunks.
SIZES = {"a": 5, "b": 3 << 20, "c": 17, "d": (40 << 20) + 1, "e": 2 << 20, "f": 1}


@pytest.mark.parametrize("changed", [*SIZES, "number", None])
def test_a_value_that_processes_have_for_themselves_must_be_one(
    changed: str | None, tmp_path: Path
) -> None:
    """On its disk each keeps its own; of a step of all, only one would be left."""
    state: dict[str, Any] = {name: np.zeros(size, np.uint8) for name, size in SIZES.items()}
    state["number"] = 3
    other = dict(state)
    if changed == "number":
        other[changed] = 4
    elif changed is not None:
        other[changed] = state[changed].copy()
        other[changed][-1] = 1
    mgrs = managers(tmp_path, 2, own_disks=True, seconds=FAR)
    assert steps(saved(mgrs, 1, state, other)) == [1, 1]
    closed(mgrs)
    parts = [tmp_path / str(index) / "1" for index in range(2)]
    if changed is None:
        join(parts, tmp_path / "joined")
        assert ckpt.sync.load(tmp_path / "joined")["number"] == 3
        return
    with pytest.raises(CoordinationError, match=r"on process 0, and .* on process 1") as caught:
        join(parts, tmp_path / "joined")
    assert f"leaf '{changed}' has one value for all processes" in str(caught.value)
