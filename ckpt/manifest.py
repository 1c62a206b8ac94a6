"""The manifest of a step: its models and its bytes. Imports neither jax nor tensorstore."""

from __future__ import annotations

from ckpt._format.manifest import *  # noqa: F403
from ckpt._format.manifest import __all__ as __all__
