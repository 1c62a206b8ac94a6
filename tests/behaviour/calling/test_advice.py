"""Inputs of a first hour: each is taken, or refused with what to do instead."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from orbax.checkpoint import v1 as ocp

import ckpt
import ckpt.sync
from ckpt import errors
from tests.behaviour.opening.damaged_roots import make_root, state, warnings_of


@dataclasses.dataclass
class Config:
    width: int = 3


# --- Paths that are not checkpoints ---------------------------------------------------------------


def nothing(path: Path) -> Path:
    return path / "nothing"


def a_root(path: Path) -> Path:
    return make_root(path / "run")


def another_file(path: Path) -> Path:
    file = path / "model.txt"
    file.write_text("hello")
    return file


def of_orbax(path: Path) -> Path:
    ocp.save(path / "orbax", {"w": jnp.ones(3)})
    return path / "orbax"


def an_empty_folder(path: Path) -> Path:
    (path / "empty").mkdir()
    return path / "empty"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (nothing, "there is no directory .*nothing"),
        (a_root, "is a root with the steps 1, 2, 3, .*/run/3'"),
        (another_file, "is a file; a checkpoint of this library is a directory"),
        (an_empty_folder, r"there is no ckpt\.json in it"),
    ],
)
@pytest.mark.parametrize("call", [ckpt.sync.load, ckpt.sync.metadata, ckpt.sync.verify])
def test_what_is_at_a_wrong_path(
    call: Callable[[Path], Any], make: Callable[[Path], Path], message: str, tmp_path: Path
) -> None:
    path = make(tmp_path)
    with pytest.raises(errors.NotACheckpointError, match=message):
        call(path)


def test_a_checkpoint_of_orbax_cannot_be_verified(tmp_path: Path) -> None:
    with pytest.raises(errors.NotACheckpointError, match=r"of Orbax.*no digests to verify"):
        ckpt.sync.verify(of_orbax(tmp_path))


# --- Arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda mgr: mgr.save(8), "step 8: there is nothing to save"),
        (lambda mgr: mgr.save(8, 1, items={"a": 1}), "and not both"),
        (
            lambda mgr: mgr.save(8, items={"c": {"config": Config()}}),
            r"^step 8, item 'c', leaf 'config': a leaf of type .*Config.*dataclasses\.asdict",
        ),
        (lambda mgr: mgr.save(8, argparse.Namespace(a=1)), r"metadata=vars\(arguments\)"),
        (pickle.dumps, "Open a manager in each process"),
        (copy.copy, "Open a manager in each process"),
        (lambda mgr: pickle.dumps(mgr.save(9, {"w": 1})), "a commit cannot be pickled"),
    ],
)
def test_advice(call: Callable[[Any], Any], message: str, tmp_path: Path) -> None:
    with (
        ckpt.sync.CheckpointManager(tmp_path) as mgr,
        pytest.raises(errors.CheckpointError, match=message),
    ):
        call(mgr)


def test_permissions_in_decimal(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=r"Did you mean 0o755\?"):
        ckpt.storage.Local(tmp_path, permission_mode=755)


def test_modes_and_dtypes_may_be_given_by_name(tmp_path: Path) -> None:
    tree = {"params": {"w": jnp.ones(2000)}, "step": jnp.int32(3)}
    with ckpt.sync.CheckpointManager(
        tmp_path, staging="view", formats={"params": "bfloat16"}
    ) as mgr:
        mgr.save(1, tree, durable=True)
        found = mgr.restore(1)
        assert found["params"]["w"].dtype == jnp.bfloat16
        assert found["step"].dtype == jnp.int32
    with pytest.raises(errors.InvalidArgumentError, match="'auto', 'copy', 'view', 'device'"):
        ckpt.sync.CheckpointManager(tmp_path, staging="fast")  # type: ignore[arg-type]
    for wrong in ("bfloat17", 3, None):
        with pytest.raises(errors.InvalidArgumentError, match="or a dtype such as 'bfloat16'"):
            ckpt.sync.CheckpointManager(tmp_path, formats={"params": wrong})  # type: ignore[dict-item]


def test_large_metadata_is_pointed_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ckpt.sync.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, {"w": 1}, custom_metadata={"text": "x" * 1000}, durable=True)
        assert warnings_of(caplog) == []
        mgr.save(2, {"w": 1}, custom_metadata={"text": "x" * (2 << 20)}, durable=True)
        (warning,) = warnings_of(caplog)
        assert "step 2 has 2 MiB of metadata" in warning


def test_an_unknown_class_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ckpt.sync.CheckpointManager(tmp_path / "run") as mgr:

        @jax.tree_util.register_dataclass
        @dataclasses.dataclass
        class Local:
            w: Any

        mgr.save(1, Local(jnp.ones(3)), durable=True)
        for _ in range(3):
            mgr.restore(1)
        (warning,) = warnings_of(caplog)
        assert "ckpt.types.UnknownNode" in warning


MODULES = ["errors", "extensions", "handlers", "keep", "observers", "save_when", "storage"]
MODULES += ["surgery", "sync", "types"]


@pytest.mark.parametrize("name", [*MODULES, "coordination", "manifest", "step_names"])
def test_modules_show_public_names_only(name: str) -> None:
    module = importlib.import_module(f"ckpt.{name}")
    assert dir(module) == sorted(module.__all__)
    for each in module.__all__:
        assert getattr(module, each) is not None


def test_a_one_shot_path_that_exists(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "a", state(1))
    with pytest.raises(errors.StepExistsError, match="Choose another path"):
        ckpt.sync.save(tmp_path / "a", state(2))
