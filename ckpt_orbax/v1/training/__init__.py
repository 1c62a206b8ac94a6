"""The steps of a run: `Checkpointer`, with policies."""

from ckpt_orbax import policies
from ckpt_orbax.metadata import RootMetadata as RootMetadata
from ckpt_orbax.v1._calls import CheckpointMetadata as CheckpointMetadata
from ckpt_orbax.v1.training import errors as errors
from ckpt_orbax.v1.training.checkpointer import Checkpointer as Checkpointer

preservation_policies = save_decision_policies = policies
