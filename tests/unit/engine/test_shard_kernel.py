"""The kernel of vital signs finds what the host finds, for any box, dtype and values."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt._format.array_format import DTYPES
from ckpt._vitals.extension.device_pass import (
    KERNEL_DTYPES,
    KernelKey,
    Kernels,
    is_run,
    signs_records,
)
from ckpt._vitals.signs import Array, box_signs

AWKWARD = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, 3e-39, 3e38, -1e30, 1e-25, 2.0, -7.0]


def values(name: str, shape: tuple[int, ...], seed: int) -> Array:
    """Return values of all bit patterns and sizes, with some that are easily lost."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (*shape, DTYPES[name].itemsize), np.uint8)
    array = raw.view(DTYPES[name]).reshape(shape).copy()
    flat = array.reshape(-1)
    places = rng.choice(flat.size, min(flat.size, len(AWKWARD)), replace=False)
    with np.errstate(over="ignore"):
        flat[places] = np.array(AWKWARD[: len(places)]).astype(DTYPES[name])
    return array


def kernel_of(key: KernelKey) -> Any:
    kernels = Kernels()
    kernels.compile(key)
    kernel = kernels.find(key)
    assert kernel is not None
    return kernel


def on_host(array: Array, offset: tuple[int, ...]) -> Array:
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return box_signs(raw, offset, array.shape, array.dtype, len)


def assert_same(found: Array, wanted: Array) -> None:
    assert found["fingerprint"].tolist() == wanted["fingerprint"].tolist()
    assert found["nonfinite"] == wanted["nonfinite"]
    assert found["absmax"] == wanted["absmax"]
    assert found["norm"] == pytest.approx(wanted["norm"], rel=1e-5)


@given(
    st.sampled_from(sorted(KERNEL_DTYPES)),
    st.lists(st.integers(1, 9), min_size=0, max_size=2),
    st.integers(1, 5000),
    st.integers(1, 4),
    st.lists(st.integers(0, 9000), min_size=3, max_size=3),
    st.integers(0, 1000),
    st.floats(0, 0.99),
)
# Each example is compiled.
@settings(max_examples=12, deadline=None)
def test_it_finds_what_the_host_finds(
    name: str,
    outer: list[int],
    row: int,
    chunks: int,
    corner: list[int],
    seed: int,
    missing: float,
) -> None:
    chunk = (*outer, row)
    # The last chunk may be shorter.
    shard = (chunk[0] * chunks - int(missing * chunk[0]), *chunk[1:])
    assert is_run(chunk, shard)
    offset = tuple(corner[: len(shard)])
    array = values(name, shard, seed)
    device = jax.devices()[0]
    kernel = kernel_of(KernelKey((device,), shard, name, chunk, (offset,)))
    found = signs_records(*map(np.asarray, kernel(jax.device_put(array, device))))
    assert found.shape == (1, chunks)
    for number in range(chunks):
        first = number * chunk[0]
        part = array[first : first + chunk[0]]
        assert_same(found[0, number], on_host(part, (offset[0] + first, *offset[1:])))


def test_a_long_vector_has_upper_digits() -> None:
    array = np.random.default_rng(0).standard_normal(3_000_000).astype(np.float32)
    kernel = kernel_of(KernelKey((jax.devices()[0],), array.shape, "float32", array.shape, ((5,),)))
    found = signs_records(*map(np.asarray, kernel(jnp.asarray(array))))
    assert_same(found[0, 0], on_host(array, (5,)))


def test_every_device_tells_of_its_own_shard() -> None:
    array = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
    devices = tuple(jax.devices()[:4])
    # The second and the fourth hold the same part.
    corners = ((0, 0), (16, 0), (32, 0), (16, 0))
    key = KernelKey(devices, (16, 32), "float32", (16, 32), corners)
    parts = [array[first : first + 16] for first, _ in corners]
    joined = jax.device_put(np.concatenate(parts), key.sharding())
    found = signs_records(*map(np.asarray, kernel_of(key)(joined)))
    for number, (part, corner) in enumerate(zip(parts, corners, strict=True)):
        assert_same(found[number, 0], on_host(part, corner))


@pytest.mark.parametrize("name", sorted(KERNEL_DTYPES))
def test_it_needs_hardly_any_memory(name: str) -> None:
    shape = (512, 4096)
    kernel = kernel_of(KernelKey((jax.devices()[0],), shape, name, (128, 4096), ((0, 0),)))
    nbytes = math.prod(shape) * DTYPES[name].itemsize
    assert kernel.memory_analysis().temp_size_in_bytes < nbytes // 8


def test_what_cannot_be_compiled_is_said_once_and_left_to_the_host(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # A chunk of another rank than the shard.
    key = KernelKey((jax.devices()[0],), (4, 4), "float32", (4,), ((0, 0),))
    kernels = Kernels()
    kernels.compile(key)
    assert kernels.find(key) is None
    kernels.want([key])
    assert not kernels.wanted
    (record,) = caplog.records
    assert "float32[4, 4]" in record.message
    assert "on the host" in record.message
