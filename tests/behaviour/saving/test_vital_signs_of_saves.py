"""Vital signs of saves: those of the values at the call, whatever the layout, whoever writes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ckpt
from ckpt._format.array_format import DTYPES
from ckpt._vitals.signs import box_signs, signs_of
from ckpt.extensions import VitalSigns
from ckpt.types import LeafSigns

save = partial(ckpt.sync.save, extensions=[ckpt.extensions.VitalSigns()])
MESHES: list[tuple[dict[str, int], PartitionSpec]] = [
    ({"x": 8}, PartitionSpec("x")),
    ({"x": 8}, PartitionSpec(None, "x")),
    ({"x": 8}, PartitionSpec()),
    ({"x": 2, "y": 4}, PartitionSpec("x", "y")),
    ({"x": 4, "y": 2}, PartitionSpec("x", "y")),
    ({"x": 4, "y": 2}, PartitionSpec("y")),
    ({"x": 2, "y": 4}, PartitionSpec(None, ("y", "x"))),
]


def expected(array: Any) -> LeafSigns:
    host = np.asarray(array)
    raw = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
    found = signs_of(box_signs(raw, (0,) * host.ndim, host.shape, host.dtype, len))
    assert found is not None
    return found


def stored(path: Path) -> dict[str, LeafSigns]:
    (leaves,) = ckpt.sync.metadata(path).leaves.values()
    found = {name: VitalSigns.of(leaf) for name, leaf in leaves.items() if hasattr(leaf, "dtype")}
    return {name: signs for name, signs in found.items() if signs is not None}


def assert_signs(found: LeafSigns, array: Any) -> None:
    wanted = expected(array)
    assert (found.fingerprint, found.nonfinite) == (wanted.fingerprint, wanted.nonfinite)
    assert found.norm == pytest.approx(wanted.norm, rel=1e-6)
    assert found.absmax == wanted.absmax


def put(array: Any, axes: Mapping[str, int], spec: PartitionSpec) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(tuple(axes.values())), tuple(axes))
    return jax.device_put(array, NamedSharding(mesh, spec))


@pytest.mark.parametrize(("axes", "spec"), MESHES, ids=str)
def test_every_mesh_gives_the_same(
    tmp_path: Path, axes: dict[str, int], spec: PartitionSpec
) -> None:
    rng = np.random.default_rng(0)
    # The first is one chunk, the others have a chunk for every shard.
    state = {
        "small": rng.standard_normal((16, 24)).astype(np.float32),
        "large": rng.standard_normal((400, 424)).astype(np.float32),
        "odd": rng.integers(0, 255, (408, 1000)).astype(np.uint8),
        "half": rng.standard_normal((800, 424)).astype(DTYPES["bfloat16"]),
    }
    save(tmp_path / "a", {name: put(each, axes, spec) for name, each in state.items()})
    found = stored(tmp_path / "a")
    for name, array in state.items():
        assert_signs(found[name], array)


@given(
    st.sampled_from(["float32", "bfloat16", "uint8", "complex128"]),
    st.lists(st.integers(1, 700), min_size=1, max_size=3).filter(
        lambda shape: 1 << 18 < math.prod(shape) < 1 << 20
    ),
    st.integers(4096, 300_000),
    st.sampled_from([(0,), (-1,)]),
)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_every_choice_of_chunks_gives_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    shape: list[int],
    chunk_bytes: int,
    split_axes: tuple[int, ...],
) -> None:
    raw = np.random.default_rng(1).integers(0, 60, (*shape, DTYPES[name].itemsize), np.uint8)
    array = raw.view(DTYPES[name]).reshape(shape)
    path = tmp_path_factory.mktemp("save") / "a"
    format = ckpt.ArrayFormat(chunk_bytes=chunk_bytes, split_axes=split_axes)
    save(path, {"x": array}, formats={"x": format})
    assert_signs(stored(path)["x"], array)


@pytest.mark.parametrize("codec", ["zstd", "blosc"])
def test_compressed_leaves_have_those_of_their_values(tmp_path: Path, codec: Any) -> None:
    array = np.random.default_rng(0).standard_normal((700, 501)).astype(np.float32)
    formats = {"x": ckpt.ArrayFormat(compression=codec)}
    save(tmp_path / "a", {"x": array}, formats=formats)
    assert_signs(stored(tmp_path / "a")["x"], array)


def test_thousands_of_small_leaves_have_theirs(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    state = {f"w{n}": rng.standard_normal((n % 7, 5)).astype(np.float32) for n in range(1000)}
    state |= {f"i{n}": np.full(n % 5, n, np.int16) for n in range(50)}
    save(tmp_path / "a", state)
    found = stored(tmp_path / "a")
    for name, array in state.items():
        assert_signs(found[name], array)


@pytest.mark.parametrize("mode", ["copy", "view", "device"])
def test_they_are_those_of_the_moment_of_the_call(tmp_path: Path, mode: Any) -> None:
    step = jax.jit(lambda x: x * jnp.nan, donate_argnums=0)
    host = np.random.default_rng(0).standard_normal((800, 500)).astype(np.float32)
    state, numbers = jnp.asarray(host.copy()), np.ones(300_000, np.float32)
    with ckpt.sync.CheckpointManager(
        tmp_path, extensions=[ckpt.extensions.VitalSigns()], staging=mode
    ) as mgr:
        commit = mgr.save(1, {"x": state, "n": numbers})
        state = step(state)
        numbers[:] = math.nan
        assert commit.result().nonfinite_leaves == 0
    assert_signs(stored(tmp_path / "1")["x"], host)
    assert_signs(stored(tmp_path / "1")["n"], np.ones(300_000, np.float32))


def test_a_save_in_parts_has_those_of_all_parts(tmp_path: Path) -> None:
    host = np.random.default_rng(0).standard_normal((300, 500)).astype(np.float32)
    with (
        ckpt.sync.CheckpointManager(tmp_path, extensions=[ckpt.extensions.VitalSigns()]) as mgr,
        mgr.partial(1) as part,
    ):
        part.save({"a": {"x": jnp.asarray(host)}})
        part.save({"a": {"y": host[::-1].copy(), "bad": np.array([math.inf])}})
    found = stored(tmp_path / "1")
    assert_signs(found["a.x"], host)
    assert_signs(found["a.y"], host[::-1])
    assert found["a.bad"] == LeafSigns(expected(np.array([math.inf])).fingerprint, 1, 0.0, 0.0)


def test_keys_and_shared_arrays_have_theirs(tmp_path: Path) -> None:
    key, array = jax.random.key(7), jnp.arange(7.0)
    save(tmp_path / "a", {"key": key, "one": array, "two": array, "n": 3, "t": True})
    found = stored(tmp_path / "a")
    assert sorted(found) == ["key", "one", "two"]
    assert_signs(found["key"], jax.random.key_data(key))
    assert_signs(found["one"], array)
    assert found["one"] == found["two"]


def test_the_text_of_the_metadata_names_leaves_that_are_not_finite(tmp_path: Path) -> None:
    info = save(tmp_path / "a", {"w": jnp.array([1.0, jnp.nan, jnp.inf]), "b": 1.5})
    assert info.nonfinite_leaves == 1
    assert "2 values are not finite" in str(ckpt.sync.metadata(tmp_path / "a"))


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [each.getMessage() for each in caplog.records if "NaN or" in each.getMessage()]
    caplog.clear()
    return found


def test_a_save_with_nan_names_its_leaves_when_they_are_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mask = {"mask": jnp.full(3, -jnp.inf)}
    odd = {f"w{n}": jnp.zeros(4).at[:n].set(jnp.nan) for n in range(1, 4)}
    with ckpt.sync.CheckpointManager(tmp_path, extensions=[ckpt.extensions.VitalSigns()]) as mgr:
        mgr.save(1, {"w": jnp.ones(3)}).result()
        assert told(caplog) == []
        mgr.save(2, mask).result()
        assert told(caplog) == ["step 2 was saved with NaN or infinite values in 1 leaf: mask (3)"]
        mgr.save(3, mask).result()
        assert told(caplog) == []
        mgr.save(4, items={"a": mask | odd, "b": odd}).result()
        (text,) = told(caplog)
        named = "a:mask (3), a:w1 (1), a:w2 (2), a:w3 (3), b:w1 (1), and 2 more"
        assert text.endswith(f"in 7 leaves: {named}")
        mgr.save(5, {"w": jnp.ones(3)}).result()
        mgr.save(6, mask).result()
        assert len(told(caplog)) == 1
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(7, odd).result()
    assert told(caplog) == []


def test_every_checkpoint_by_itself_with_nan_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        save(tmp_path / name, {"w": jnp.full(2, jnp.nan)})
        (text,) = told(caplog)
        assert text == f"{tmp_path / name} was saved with NaN or infinite values in 1 leaf: w (2)"
        path = tmp_path / f"{name}, later"
        ckpt.sync.save(
            path,
            {"w": jnp.full(2, jnp.nan)},
            extensions=[ckpt.extensions.VitalSigns()],
            durable=False,
        ).result()
        assert len(told(caplog)) == 1
