"""The error for a missing library that only some users need."""

from __future__ import annotations

from ckpt.errors import CheckpointError


def missing(name: str, library: str, extra: str) -> CheckpointError:
    """Return the error of `name`, which needs a library that is not installed.

    Args:
        name: The class or function that needs the library.
        library: The library as people know it.
        extra: The extra of this package that installs it.
    """
    return CheckpointError(
        f"{name} needs {library}, which is not installed: pip install 'ckpt-jax[{extra}]'"
    )
