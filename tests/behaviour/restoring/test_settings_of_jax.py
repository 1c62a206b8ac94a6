"""What a program has set in jax is for its own code: saves and restores work with all of it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ckpt
import ckpt.sync
from ckpt.errors import TargetMismatchError

MESHES = {
    kind: jax.make_mesh((4, 2), ("a", "b"), axis_types=(getattr(AxisType, kind),) * 2)
    for kind in ("Auto", "Explicit")
}
PLACES: dict[str, Any] = {"free": None, "one": jax.devices()[5]}
for kind, mesh in MESHES.items():
    PLACES |= {f"cut {kind}": NamedSharding(mesh, P("a", "b")), kind: NamedSharding(mesh, P())}
DTYPES = ["float32", "bfloat16", "int32", "bool", "complex64"]
DTYPES += ["int4", "uint4", "int2", "uint2", "float4_e2m1fn", "float8_e4m3fn"]


def array(dtype: str, place: str) -> jax.Array:
    found: jax.Array
    if dtype == "key":
        found = jax.random.key(3)
        return found if place == "free" else jax.device_put(found, jax.devices()[5])
    if dtype == "weak":
        found = jnp.asarray(jnp.nan)
        return found if "cut" in place else jax.device_put(found, PLACES[place])
    values = np.ones((8, 4)).astype(jnp.dtype(dtype))
    if dtype == "float32":
        values[0, 0] = np.nan
    found = jax.device_put(values, PLACES[place])
    return found


ARRAYS = {
    f"{dtype} {place}": array(dtype, place)
    for dtype in [*DTYPES, "key", "weak"]
    for place in PLACES
}
with jax.enable_x64(True):
    WIDE = {
        "float64": jax.device_put(np.full((8, 4), 1e300), PLACES["cut Explicit"]),
        "int64": jnp.asarray(np.arange(3, dtype=np.int64)),
    }

SETTINGS = {
    "jax_transfer_guard": "disallow",
    "jax_debug_nans": True,
    "jax_debug_infs": True,
    "jax_disable_jit": True,
    "jax_numpy_rank_promotion": "raise",
    "jax_numpy_dtype_promotion": "strict",
    "jax_enable_checks": True,
}


@contextlib.contextmanager
def settings_of_program(names: set[str]) -> Iterator[None]:
    before = {name: getattr(jax.config, name) for name in names}
    try:
        for name in names:
            jax.config.update(name, SETTINGS[name])
        yield
    finally:
        for name in names:
            jax.config.update(name, before[name] if before[name] is not None else "allow")


@contextlib.contextmanager
def settings_of_thread(names: set[str]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(getattr(jax, name.removeprefix("jax_"))(SETTINGS[name]))
        yield


def bits(value: jax.Array) -> tuple[str, bytes]:
    data = jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value
    return str(value.dtype), np.asarray(data).tobytes()


@given(
    st.sets(st.sampled_from(sorted(SETTINGS))),
    st.booleans(),
    st.sets(st.sampled_from(sorted(ARRAYS)), min_size=1, max_size=12),
    st.sampled_from([None, *MESHES]),
    st.booleans(),
    st.sampled_from(["copy", "view", "device"]),
)
def test_every_combination_works(
    names: set[str], is_global: bool, chosen: set[str], mesh: str | None, x64: bool, mode: Any
) -> None:
    tree: dict[str, Any] = {name: ARRAYS[name] for name in chosen} | (WIDE if x64 else {})
    like: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=each.sharding)
        for name, each in tree.items()
        if each.committed
    }
    chosen_settings = settings_of_program if is_global else settings_of_thread
    with (
        tempfile.TemporaryDirectory() as root,
        jax.enable_x64(x64),
        jax.set_mesh(MESHES[mesh] if mesh else None),
        chosen_settings(names),
        ckpt.sync.CheckpointManager(
            root, staging=ckpt.Staging(mode=mode), extensions=[ckpt.extensions.VitalSigns()]
        ) as mgr,
    ):
        for step in range(2):
            mgr.save(step, tree)
        mgr.wait_until_finished()
        found: Any = mgr.restore(1)
        placed: Any = mgr.restore(1, like, adapt=ckpt.Adapt(extra="ignore"), check_devices=True)
        copied = mgr.restore(1, tree, memory="buffers")
    for name, each in tree.items():
        for other in (found, placed, copied):
            if name in other:
                assert bits(other[name]) == bits(each), name
                assert other[name].committed == each.committed, name
                assert other[name].sharding.is_equivalent_to(each.sharding, each.ndim), name


def test_64_bits_come_back_where_the_caller_has_them_and_are_refused_by_leaf_elsewhere(
    tmp_path: Path,
) -> None:
    ckpt.sync.save(tmp_path / "x", {**WIDE, "narrow": jnp.ones(3)})
    with pytest.raises(TargetMismatchError, match="jax_enable_x64 is off") as caught:
        ckpt.sync.load(tmp_path / "x")
    assert sorted(line.partition(":")[0] for line in caught.value.problems) == ["float64", "int64"]
    with jax.enable_x64(True):
        found = ckpt.sync.load(tmp_path / "x")
    for name, each in WIDE.items():
        assert bits(found[name]) == bits(each)
    jax.config.update("jax_enable_x64", True)
    try:
        with jax.enable_x64(False), pytest.raises(TargetMismatchError):
            ckpt.sync.load(tmp_path / "x")
    finally:
        jax.config.update("jax_enable_x64", False)
