"""The steps of a run: `Checkpointer`, with policies."""

from ckpt_orbax import policies as preservation_policies
from ckpt_orbax import policies as save_decision_policies
from ckpt_orbax.metadata import RootMetadata
from ckpt_orbax.v1._calls import CheckpointMetadata
from ckpt_orbax.v1.training import errors
from ckpt_orbax.v1.training.checkpointer import Checkpointer

__all__ = [
    "CheckpointMetadata",
    "Checkpointer",
    "RootMetadata",
    "errors",
    "preservation_policies",
    "save_decision_policies",
]
