"""The page for people who come from Orbax leaves nothing out."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.checkpoint_utils as utils
import pytest
from etils import epath
from orbax.checkpoint import checkpoint_managers
from orbax.checkpoint._src.logging.event_tracking import OperationRecorder
from orbax.checkpoint._src.logging.prometheus_monitoring import PrometheusMonitoring
from orbax.checkpoint.experimental import v1
from orbax.checkpoint.experimental.v1._src.saving import validation as v1_saving

import ckpt
import ckpt.sync
from ckpt import errors, policies, step_names
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "migrating-from-orbax.md").read_text()
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
    "restore arguments": arguments(utils.construct_restore_args),
    "arguments of save": arguments(ocp.CheckpointManager.save),
    "arguments of restore": arguments(ocp.CheckpointManager.restore),
    "arguments of the list": arguments(ocp.CheckpointManager.all_steps),
    "metadata of a step": {field.name for field in dataclasses.fields(ocp.metadata.StepMetadata)},
    "reserved names": {
        name
        for module in (ocp.checkpoint_manager, v1_saving)
        for name in public(module)
        if name.startswith("RESERVED")
    },
    "errors": {
        name
        for module in (ocp.checkpoint_manager, v1.errors, v1.training.errors)
        for name in public(module)
        if name.endswith("Error")
    },
    "step names": public(ocp.path.step.NameFormat),
    "options of files": {
        field.name
        for kind in (
            *(ocp.options.AtomicityOptions, ocp.options.FileOptions),
            ocp.options.MultiprocessingOptions,
        )
        for field in dataclasses.fields(kind)
    },
    "unfinished steps": {
        name for name in public(ocp.path.atomicity) if name.endswith("TemporaryPath")
    },
    "deletion": {name for name in public(ocp.path.deleter) if name.endswith("Deleter")},
    "loggers": public(ocp.logging) - {"step_statistics"} | public(ocp.logging.AbstractLogger),
    "statistics": {
        name
        for name in public(ocp.logging.step_statistics)
        if name.endswith("Statistics") and not name.startswith("Emergency")
    },
    "telemetry": {OperationRecorder.__name__, PrometheusMonitoring.__name__},
    "calls of the checkpointer": set().union(
        *(
            arguments(call)
            for call in vars(v1.training.Checkpointer).values()
            if inspect.isfunction(call) and not call.__name__.startswith("_")
        )
    )
    - {"args", "kwargs"},
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
    for name in {name for text in RIGHT for name in re.findall(r"\berrors\.(\w+)", text)}:
        assert hasattr(errors, name)
    for name in {name for text in RIGHT for name in re.findall(r"mgr\.(\w+)", text)}:
        assert hasattr(ckpt.CheckpointManager, name)
    calls = (
        *(ckpt.CheckpointManager, ckpt.CheckpointManager.save, ckpt.CheckpointManager.restore),
        *(ckpt.CheckpointManager.delete, ckpt.watch, ckpt.load, ckpt.Adapt),
        *(policies.BestN, policies.EveryNSteps, policies.Deletion),
    )
    known = set().union(*map(arguments, calls))
    used = {name for text in RIGHT for name in re.findall(r"\b(\w+)=", text)}
    assert {"like", "keep_without_metrics", "until"} <= used
    assert used - known == set()


# --- What the page says of both, done with both ---------------------------------------------------


def save(root: Path, *steps: int) -> None:
    with ckpt.sync.CheckpointManager(root) as mgr:
        for step in steps:
            mgr.save(step, {"w": np.full(2, step)})


def test_the_port_is_the_one_that_the_page_says() -> None:
    port = inspect.signature(PrometheusMonitoring).parameters["port"].default
    assert f"port {port} " in PAGE
    assert f"start_http_server({port})" in PAGE


def test_the_best_steps_are_the_same_and_the_latest_stays_besides(tmp_path: Path) -> None:
    losses = {step: abs(step - 4.25) for step in range(1, 12)}
    options = ocp.CheckpointManagerOptions(
        max_to_keep=3, keep_period=10, best_fn=lambda metrics: metrics["loss"], best_mode="min"
    )
    with ocp.CheckpointManager(tmp_path / "theirs", options=options) as theirs:
        for step, loss in losses.items():
            state = ocp.args.StandardSave({"w": np.zeros(2)})
            theirs.save(step, args=state, metrics={"loss": loss})
        theirs.wait_until_finished()
        kept = theirs.all_steps()
    keep = policies.AnyPreservation(
        policies.BestN(3, metric="loss", mode="min"), policies.EveryNSteps(10)
    )
    with ckpt.sync.CheckpointManager(tmp_path / "ours", preservation=keep) as ours:
        for step, loss in losses.items():
            ours.save(step, {"w": np.zeros(2)}, metrics={"loss": loss})
        ours.wait_until_finished()
        assert ours.all_steps() == sorted({*kept, 11}) == [3, 4, 5, 10, 11]


def test_a_function_that_says_false_waits_on(tmp_path: Path) -> None:
    def run_of(root: Path) -> Callable[[], bool]:
        left = [0, 1, 2]

        def is_over() -> bool:
            if not left:
                return True
            save(root, left.pop(0))
            return False

        return is_over

    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    seen = utils.checkpoints_iterator(
        theirs, seconds_to_sleep=0, timeout=0, timeout_fn=run_of(theirs)
    )
    assert list(seen) == [0, 1, 2]
    seen_here = ckpt.sync.watch(ours, poll_interval=0.01, until=run_of(ours))
    assert [info.step for info in seen_here] == [0, 1, 2]
    # What the page warns of.
    assert list(ckpt.sync.watch(tmp_path / "none", timeout=0, until=lambda: False)) == []


@pytest.mark.parametrize("until_step", [None, 1, 2, 3, 4])
def test_the_step_that_is_waited_for_is_the_same(tmp_path: Path, until_step: int | None) -> None:
    save(tmp_path, 1, 3)
    with utils.wait_for_new_checkpoint(
        epath.Path(tmp_path), until_step=until_step, timeout=0, seconds_to_sleep=0
    ) as step:
        found = step
    after = None if until_step is None else until_step - 1
    with ckpt.sync.watch(tmp_path, after=after, only_latest=True, timeout=0) as steps:
        info = next(steps, None)
        assert (-1 if info is None else info.step) == found
        with ckpt.sync.CheckpointManager(tmp_path, read_only=True) as mgr:
            assert list(mgr.pins()) == ([] if info is None else [found])


@pytest.mark.parametrize("args", [None, ocp.args.StandardRestore({"w": np.zeros(2, int)})])
def test_a_v0_manager_restores_an_unnamed_state_as_one_of_its_own(
    tmp_path: Path, args: Any
) -> None:
    save(tmp_path, 1)
    with ocp.CheckpointManager(tmp_path) as theirs:
        assert theirs.restore(1, args=args)["w"].tolist() == [1, 1]
