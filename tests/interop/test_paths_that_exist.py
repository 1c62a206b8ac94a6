"""`ckpt.save` at a path where there is something: nothing, a checkpoint of Orbax, or another's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp0
import pytest
from orbax.checkpoint import v1 as ocp

import ckpt
import ckpt.sync
from ckpt import errors

OLD, NEW = {"w": np.arange(4.0)}, {"w": np.arange(4.0) + 1}


def with_standard(path: Path) -> None:
    with ocp0.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, OLD)


def with_pytree(path: Path) -> None:
    ocp0.PyTreeCheckpointer().save(path, OLD)


def with_v1(path: Path) -> None:
    ocp.save(path, OLD)


WRITERS = [with_standard, with_pytree, with_v1]


@pytest.mark.parametrize("if_exists", ["replace", "error"])
def test_an_empty_directory_is_taken(tmp_path: Path, if_exists: Any) -> None:
    (tmp_path / "best").mkdir()
    ckpt.sync.save(tmp_path / "best", NEW, if_exists=if_exists)
    assert np.array_equal(ckpt.sync.load(tmp_path / "best")["w"], NEW["w"])
    assert os.listdir(tmp_path) == ["best"]


def test_so_it_is_by_a_save_in_the_background(tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    ckpt.sync.save(tmp_path / "best", NEW, durable=False).result()
    assert np.array_equal(ckpt.sync.load(tmp_path / "best")["w"], NEW["w"])


@pytest.mark.parametrize("if_exists", ["replace", "error"])
@pytest.mark.parametrize("what", ["file", "link", "file in it", "file below"])
def test_what_is_not_empty_stays(tmp_path: Path, what: str, if_exists: Any) -> None:
    path = tmp_path / "best"
    (tmp_path / "elsewhere").mkdir()
    if what == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif what == "file":
        path.write_text("mine")
    else:
        (path / "a").mkdir(parents=True)
        (path / ("a/mine" if what == "file below" else "mine")).write_text("mine")
    before = sorted(str(each) for each in tmp_path.rglob("*"))
    with pytest.raises(errors.StepExistsError):
        ckpt.sync.save(path, NEW, if_exists=if_exists)
    assert sorted(str(each) for each in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("write", WRITERS)
def test_a_checkpoint_of_orbax_is_replaced_if_that_is_asked_for(tmp_path: Path, write: Any) -> None:
    path = tmp_path / "best"
    write(path)
    with pytest.raises(errors.StepExistsError, match="not a checkpoint of this library"):
        ckpt.sync.save(path, NEW)
    # It stays until the new one is published.
    with pytest.raises(errors.UnsupportedLeafError):
        ckpt.sync.save(path, {"w": object()}, if_exists="replace")
    assert np.array_equal(ckpt.sync.load(path)["w"], OLD["w"])
    ckpt.sync.save(path, NEW, if_exists="replace")
    assert np.array_equal(ckpt.sync.load(path)["w"], NEW["w"])
    assert ckpt.sync.verify(path).ok
    assert os.listdir(tmp_path) == ["best"]


def test_one_that_orbax_has_not_finished_is_not(tmp_path: Path) -> None:
    path = tmp_path / "best"
    with_v1(path)
    (item,) = [each for each in path.iterdir() if each.is_dir()]
    item.rename(path / f"{item.name}{ocp0.utils.TMP_DIR_SUFFIX}")
    with pytest.raises(errors.StepExistsError):
        ckpt.sync.save(path, NEW, if_exists="replace")


def test_an_error_about_a_source_names_that_checkpoint(tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path / "base") as mgr:
        mgr.save(0, {"w": jnp.ones(3)}, durable=True)
    with (
        ckpt.sync.CheckpointManager(tmp_path / "run") as mgr,
        pytest.raises(errors.TargetMismatchError) as caught,
    ):
        mgr.resume({"w": jnp.ones(4)}, source=tmp_path / "base" / "0")
    assert f"source {tmp_path / 'base' / '0'}: the target differs" in str(caught.value)
    assert caught.value.step is None


def test_a_misspelt_item_gets_the_near_name_and_the_real_ones(tmp_path: Path) -> None:
    ckpt.sync.save(tmp_path / "best", items={"params": NEW, "opt_state": NEW})
    with pytest.raises(errors.InvalidArgumentError) as caught:
        ckpt.sync.load(tmp_path / "best", items=["parms"])
    assert "no item parms (is it 'params'?); the step has params, opt_state" in str(caught.value)
