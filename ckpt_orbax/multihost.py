"""The processes of a job."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import multihost_utils


def process_index() -> int:
    """Return the number of this process.

    Example:
        ```python
        assert ocp.multihost.process_index() < ocp.multihost.process_count()
        ```
    """
    return int(jax.process_index())


def process_count() -> int:
    """Return the number of processes.

    Example:
        ```python
        print(ocp.multihost.process_count())
        ```
    """
    return int(jax.process_count())


def is_jax_distributed_client_initialized() -> bool:
    """Return True in a job of several processes.

    Example:
        ```python
        assert not ocp.multihost.is_jax_distributed_client_initialized()
        ```
    """
    return bool(jax.distributed.is_initialized())


def is_primary_host(primary_host: int | None = 0) -> bool:
    """Return True in the process of that number; with None, in every process.

    Example:
        ```python
        if ocp.multihost.is_primary_host():
            print("saved")
        ```
    """
    return primary_host is None or bool(jax.process_index() == primary_host)


def broadcast_one_to_all(value: Any, is_source: bool | None = None) -> Any:
    """Return a value of process 0, or of the one with `is_source`, in every process.

    Its numbers come back as arrays of numpy.

    Example:
        ```python
        seed = ocp.multihost.broadcast_one_to_all(7)
        ```
    """
    return multihost_utils.broadcast_one_to_all(value, is_source)


def sync_global_processes(name: str, *_: Any, **__: Any) -> None:
    """Wait until all processes are here.

    Example:
        ```python
        ocp.multihost.sync_global_processes("after the epoch")
        ```
    """
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
