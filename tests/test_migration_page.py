"""The page for people who come from Orbax leaves nothing out."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import orbax.checkpoint.checkpoint_utils as utils
import pytest
from orbax.checkpoint import checkpoint_managers
from orbax.checkpoint.experimental import v1

import ckpt
from ckpt import policies, step_names

PAGE = (Path(__file__).parents[1] / "docs" / "migrating-from-orbax.md").read_text()
LEFT = {
    word
    for line in PAGE.splitlines()
    if line.startswith("| ")
    for text in re.findall(r"`([^`]+)`", line.split(" | ")[0])
    for word in re.findall(r"\w+", text)
}
RIGHT = [line.split(" | ", 1)[1] for line in PAGE.splitlines() if line.startswith("| ")]


def public(cls: Any) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def arguments(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self"}


INVENTORY = {
    "options": {field.name for field in dataclasses.fields(ocp.CheckpointManagerOptions)},
    "async options": {field.name for field in dataclasses.fields(ocp.AsyncOptions)},
    "manager": public(ocp.CheckpointManager),
    "arguments of the manager": arguments(ocp.CheckpointManager) - {"options"},
    "policies": {
        name
        for name in public(checkpoint_managers)
        if inspect.isclass(getattr(checkpoint_managers, name))
    }
    - {"AbstractCheckpointManager", "CheckpointManagerOptions", "PreservationContext"},
    "checkpointer": public(v1.training.Checkpointer)
    - {"load_pytree_async", "save_pytree_async"}
    - {"load_checkpointables_async", "save_checkpointables_async"},
    "arguments of the checkpointer": arguments(v1.training.Checkpointer) - {"context"},
    "partial": public(v1.partial),
    "iterator": arguments(utils.checkpoints_iterator) - {"checkpoint_dir"},
    "waiting": arguments(utils.wait_for_new_checkpoint) - {"checkpoint_dir"},
    "utilities": {
        name
        for name in public(utils)
        if inspect.isfunction(getattr(utils, name))
        and getattr(utils, name).__module__ == utils.__name__
    }
    - {"get_snapshot_dir_from_step_dir"},
}


@pytest.mark.parametrize("part", INVENTORY)
def test_everything_there_has_its_line(part: str) -> None:
    assert INVENTORY[part] - LEFT == set()


def test_everything_that_is_named_here_exists() -> None:
    named = {name for text in RIGHT for name in re.findall(r"policies\.(\w+)", text)}
    assert {"FixedInterval", "BestN", "Deletion"} <= named
    assert named <= set(policies.__all__)
    for name in {name for text in RIGHT for name in re.findall(r"step_names\.(\w+)", text)}:
        assert hasattr(step_names, name)
    for name in {name for text in RIGHT for name in re.findall(r"mgr\.(\w+)", text)}:
        assert hasattr(ckpt.CheckpointManager, name)
    calls = (
        *(ckpt.CheckpointManager, ckpt.CheckpointManager.save, ckpt.CheckpointManager.restore),
        *(ckpt.CheckpointManager.delete, ckpt.watch, ckpt.load),
        *(policies.BestN, policies.EveryNSteps, policies.Deletion),
    )
    known = set().union(*map(arguments, calls))
    used = {name for text in RIGHT for name in re.findall(r"\b(\w+)=", text)}
    assert {"like", "keep_without_metrics", "until"} <= used
    assert used - known == set()
