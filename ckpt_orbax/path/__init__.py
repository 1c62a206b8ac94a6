"""Names of steps."""

from ckpt_orbax.path import step as step
