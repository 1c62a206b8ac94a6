"""What is private in jax, or may change with a release: the only module that names it.

Each part is looked for at its first use. Without it:

    distributed.global_state       no job of `jax.distributed`; the error names the version of jax
    backends_are_initialized       devices count as unused
    batched_device_put and others  `jax.device_put` makes the arrays

`tests/unit/runtime/test_jax_internals.py` fails when a release of jax changes one of them.
"""

from __future__ import annotations

from typing import Any

import jax
from msgspec import Struct

from ckpt.errors import CoordinationError


class ArrayRuntime(Struct, frozen=True):
    """The calls in which `jax.device_put` ends.

    Attributes:
        put: Makes one array of host memory: takes its abstract value, its sharding, the memory for
            each device, the devices, whether it is committed, False, and one of the two below.
        abstract: Makes the abstract value of a shape and a dtype.
        kept: The array may be the host memory.
        copied: The host memory is only read during the call.
    """

    put: Any
    abstract: Any
    kept: Any
    copied: Any


def array_runtime() -> ArrayRuntime:
    """Return the calls that make arrays.

    Raises:
        ImportError: This version of jax lacks them.
        AttributeError: This version of jax lacks them.
    """
    from jax._src import core
    from jax._src.lib import xla_client  # type: ignore[attr-defined]

    how = xla_client.HostBufferSemantics
    return ArrayRuntime(
        xla_client.batched_device_put,
        core.ShapedArray,
        how.ZERO_COPY,
        how.IMMUTABLE_ONLY_DURING_CALL,
    )


def distributed_state() -> Any:
    """Return the state of `jax.distributed`; its `client` is None if it is not initialized.

    Raises:
        CoordinationError: This version of jax has no such state.
    """
    try:
        from jax._src import distributed

        return distributed.global_state
    except (ImportError, AttributeError) as error:
        raise CoordinationError(unknown_version("no distributed.global_state")) from error


def job_size() -> int:
    """Return the number of processes of this job, as far as jax knows; initializes nothing.

    Raises:
        CoordinationError: There are several processes, but `jax.distributed` was not initialized.
    """
    state = distributed_state()
    if getattr(state, "client", None) is not None:
        return int(state.num_processes)
    try:
        from jax._src import xla_bridge

        are_in_use = xla_bridge.backends_are_initialized()
    except (ImportError, AttributeError):
        are_in_use = False
    # Before any device is used, jax cannot know of several processes, and asking would use devices.
    if are_in_use and jax.process_count() > 1:
        raise CoordinationError(
            f"jax has {jax.process_count()} processes, but jax.distributed is not initialized, so "
            "they cannot agree on anything; call jax.distributed.initialize() before anything "
            "else in every process, or pass a coordinator of your own (coordinator=)"
        )
    return 1


def unknown_version(what: str) -> str:
    """Return the message about a version of jax that lacks what a job needs."""
    return (
        f"jax {jax.__version__} has {what}: this library can coordinate several processes with jax "
        "0.10 to 0.12; install one of those, or pass a coordinator of your own (coordinator=)"
    )
