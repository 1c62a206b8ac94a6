"""A canary: what is private in jax, or may change with a release, is what the library takes it for.

Without these parts the library is slower, or refuses jobs of several processes; it says so only
once. So a release of jax that changes one of them is noticed here.
"""

from __future__ import annotations

import inspect

import jax
import numpy as np

from ckpt._engine.restore.destinations import memory_of, uninitialized_arrays
from ckpt._runtime import jax_internals
from ckpt.coordination._jax_service import _CALLS


def put(host: np.ndarray, how: object) -> jax.Array:
    runtime = jax_internals.array_runtime()
    device = jax.devices()[0]
    array: jax.Array = runtime.put(
        runtime.abstract(host.shape, host.dtype),
        jax.sharding.SingleDeviceSharding(device),
        [host],
        [device],
        True,
        False,
        how,
    )
    return array


def test_the_runtime_makes_arrays_of_host_memory() -> None:
    runtime = jax_internals.array_runtime()
    host = np.arange(1 << 16, dtype=np.float32)
    copied = put(host, runtime.copied)
    before = host.copy()
    host[:] = 0
    assert np.array_equal(copied, before)
    assert (copied.dtype, copied.shape, copied.committed) == (before.dtype, before.shape, True)
    kept = put(before, runtime.kept)
    assert np.array_equal(kept, before)


def test_a_copied_array_has_memory_that_can_be_donated() -> None:
    array = put(np.ones(1 << 16, np.float32), jax_internals.array_runtime().copied)
    place = array.unsafe_buffer_pointer()
    after = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert array.is_deleted()
    assert after.unsafe_buffer_pointer() == place


def test_the_state_of_jax_distributed_has_what_a_job_asks_for() -> None:
    state = jax_internals.distributed_state()
    assert state.client is None
    for name in ("process_id", "num_processes", "coordinator_address"):
        assert hasattr(state, name), name
    assert jax_internals.job_size() == 1


def test_the_client_of_the_service_has_all_calls() -> None:
    from jax._src.lib import _jax  # type: ignore[attr-defined]

    client = _jax.DistributedRuntimeClient
    assert [name for name in _CALLS if not callable(getattr(client, name, None))] == []
    assert "allow_overwrite" in client.key_value_set_bytes.__doc__


def test_whether_devices_are_in_use_is_known() -> None:
    from jax._src import xla_bridge

    assert not inspect.signature(xla_bridge.backends_are_initialized).parameters
    jax.devices()
    assert xla_bridge.backends_are_initialized()


def test_uninitialized_arrays_are_memory_of_jax() -> None:
    made = uninitialized_arrays([((4, 3), np.dtype(np.float32))], (jax.devices()[0],))
    assert made is not None, "the call frame of XLA's foreign functions has changed"
    [[array]] = made
    memory_of(array)[:] = np.ones((4, 3), np.float32).view(np.uint8).ravel()
    assert np.array_equal(array, np.ones((4, 3)))
