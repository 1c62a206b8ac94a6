"""The job that this process is part of, where nobody says otherwise."""

from __future__ import annotations

from ckpt.coordination._base import Coordinator
from ckpt.coordination._jax_service import JaxDistributed, job_size
from ckpt.coordination._single import SingleProcess

__all__ = ["default_coordinator"]


def default_coordinator() -> Coordinator:
    """Return the job of `jax.distributed` where it has several processes, else that of this one.

    Raises:
        CoordinationError: There are several processes that cannot talk to each other:
            `jax.distributed` was not initialized, or is one of a version that this library does not
            know.
    """
    return JaxDistributed() if job_size() > 1 else SingleProcess()
