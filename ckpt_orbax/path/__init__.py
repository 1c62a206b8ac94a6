"""Names of steps."""

from ckpt_orbax.path import step

__all__ = ["step"]
