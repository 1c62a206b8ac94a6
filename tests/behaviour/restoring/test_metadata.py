"""What `metadata()` tells: everything but the array bytes, without them and without devices."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding

import ckpt
from ckpt._steps.step_metadata import LeafInfo
from ckpt._tree.table import format_bytes
from tests.support.trees import P, mesh, sharded, structure


def make_state() -> dict[str, Any]:
    shared = jnp.arange(6.0)
    return {
        "params": {
            "w": sharded(np.ones((8, 4), np.float32), "data"),
            "b": jnp.zeros(4, jnp.bfloat16),
        },
        "tied": [shared, shared],
        "key": jax.random.key(1),
        "keys": jax.random.split(jax.random.key(2, impl="rbg"), (2, 3)),
        "host": (np.zeros((2, 3), np.int64), np.float16(1)),
        "activation": jax.nn.relu,
        "step": 7,
        "name": "run <b>",
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    ckpt.sync.save(tmp_path / "x", make_state())
    return tmp_path / "x"


def test_the_tree_has_the_shapes_and_dtypes_of_what_was_saved(saved: Path) -> None:
    state, tree = make_state(), ckpt.sync.metadata(saved).tree
    is_info = lambda leaf: isinstance(leaf, LeafInfo)  # noqa: E731
    assert tree["step"] == 7
    assert tree["name"] == "run <b>"
    assert tree["activation"] is ...
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_info):
        if is_info(leaf):
            original = dict(jax.tree_util.tree_leaves_with_path(state))[path]
            assert leaf.shape == original.shape, path
            if leaf.kind == "key":
                data = jax.random.key_data(original)
                assert (leaf.impl, leaf.nbytes) == (jax.random.key_impl(original), data.nbytes)
            else:
                assert (leaf.dtype, leaf.nbytes) == (original.dtype, original.nbytes)


def test_leaves_are_also_there_by_item_and_leaf_path(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", items={"a": {"w": jnp.ones(2)}, "b": jnp.ones(3)})
    leaves = ckpt.sync.metadata(tmp_path / "x").leaves
    assert {item: list(found) for item, found in leaves.items()} == {"a": ["w"], "b": ["%root"]}
    assert leaves["b"]["%root"].shape == (3,)


def test_metadata_stands_as_a_target(saved: Path) -> None:
    state = make_state()
    like = ckpt.sync.metadata(saved).tree
    like["activation"] = jax.nn.relu
    found = ckpt.sync.load(saved, like=like)
    assert structure(found) == structure(state)
    for mine, original in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        assert type(mine) is type(original)
        if isinstance(original, jax.Array) and not jnp.issubdtype(
            original.dtype, jax.dtypes.prng_key
        ):
            assert np.array_equal(mine, original)


def test_shardings_are_chosen_for_all_arrays_or_for_each(saved: Path) -> None:
    info = ckpt.sync.metadata(saved)
    replicated = NamedSharding(mesh(), P())
    found = ckpt.sync.load(saved, like=info.target(replicated))
    assert found["params"]["w"].sharding == replicated
    assert found["key"].sharding.is_equivalent_to(replicated, 0)
    assert isinstance(found["host"][0], np.ndarray)
    third = SingleDeviceSharding(jax.devices()[3])
    like = info.target(lambda leaf: third if leaf.name.startswith("params.") else replicated)
    found = ckpt.sync.load(saved, like=like)
    assert found["params"]["b"].sharding == third
    assert found["tied"][0].sharding == replicated


def test_what_is_no_sharding_cannot_be_chosen(saved: Path) -> None:
    with pytest.raises(ckpt.errors.InvalidArgumentError, match="expected a sharding"):
        ckpt.sync.metadata(saved).target("data")


def test_the_text_is_a_table_with_a_line_for_every_leaf(saved: Path) -> None:
    info = ckpt.sync.metadata(saved)
    title, *lines = str(info).splitlines()
    assert "11 leaves" in title
    assert [line.split()[0] for line in lines] == list(info.leaves["default"])
    (line,) = (line for line in lines if "params.w" in line)
    assert line.split()[1:] == [
        "float32[8,",
        "4]",
        "128",
        "B",
        "P(data)",
        "over",
        "data=2,",
        "model=4",
    ]
    assert repr(info) == str(info)


def test_a_large_tree_is_cut_short(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "x", [np.zeros(1, np.float32)] * 0 + [np.ones(2) for _ in range(500)])
    text = str(ckpt.sync.metadata(tmp_path / "x"))
    assert len(text.splitlines()) < 60
    assert "460 more leaves, 7.19 KiB" in text


def test_the_text_for_notebooks_is_html_that_runs_nothing(saved: Path) -> None:
    text = ckpt.sync.metadata(saved)._repr_html_()
    assert "<table>" in text
    assert "run &lt;b&gt;" in text
    assert "<b>" not in text
    assert "script" not in text


def test_sizes_are_written_as_people_read_them() -> None:
    expected = {0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 1010 << 10: "1010 KiB", 5 << 30: "5 GiB"}
    expected |= {1 << 62: "4096 PiB"}
    assert {nbytes: format_bytes(nbytes) for nbytes in expected} == expected


CHILD = """
import json, sys
import ckpt
from ckpt._steps.step_metadata import LeafInfo
info = ckpt.sync.metadata(sys.argv[1])
from jax._src import xla_bridge
print(json.dumps([str(info), xla_bridge.backends_are_initialized()]))
"""


def test_metadata_needs_no_devices(saved: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(saved)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    text, initialised = json.loads(done.stdout)
    assert text == str(ckpt.sync.metadata(saved))
    assert not initialised


def make_unknown() -> Any:
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Local:
        w: Any

    return Local(jnp.ones(2))


def test_a_target_that_has_a_record_for_a_class_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt.sync.save(tmp_path / "x", {"layer": make_unknown()})
    info = ckpt.sync.metadata(tmp_path / "x")
    assert not caplog.records
    assert isinstance(info.target()["layer"], ckpt.types.UnknownNode)
    (record,) = caplog.records
    assert "Local" in record.getMessage()
    assert "PyTreeHandler(classes=[...])" in record.getMessage()
