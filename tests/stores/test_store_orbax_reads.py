"""Orbax reads steps of this library from a bucket of GCS, and both take turns in one root there.

Orbax opens `gs://` by gcsfs, which like TensorStore talks to the fake of these tests.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ckpt
import ckpt.orbax
import ckpt.sync
from ckpt import errors
from tests.stores.places import Place
from tests.stores.test_store_copies import copied
from tests.support.paths import ROOT

CHILD = Path(__file__).with_name("use_orbax.py")
ALL = "CKPT_ALL_STORES" in os.environ
PATIENCE_S = 120

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not ALL, reason="takes its time: nox -s stores runs it"),
]


@pytest.fixture
def bucket(make_place: Callable[[str], Place]) -> Place:
    assert importlib.util.find_spec("gcsfs"), "the group `stores` installs gcsfs"
    return make_place("gcs")


def orbax(place: Place, what: str, *more: object) -> dict[str, Any]:
    """Let a process do something with Orbax in the root `run`, and return what it found."""
    url = f"http://127.0.0.1:{place.port}"
    env = dict(os.environ) | {
        "TENSORSTORE_GCS_HTTP_URL": url,
        "STORAGE_EMULATOR_HOST": url,
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, str(CHILD), what, f"gs://{place.bucket}/run", *map(str, more)],
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def state(step: int) -> dict[str, Any]:
    return {"w": jnp.arange(1000.0) + step, "opt": {"step": jnp.int32(step)}}


def sums(step: int) -> dict[str, float]:
    return {"opt/step": float(step), "w": 1000 * 999 / 2 + 1000.0 * step}


def save(place: Place, *steps: int) -> None:
    with ckpt.sync.CheckpointManager(place.root("run")) as mgr:
        for step in steps:
            mgr.save(step, state(step), metrics={"loss": float((step - 2) ** 2)}, durable=True)


def test_its_manager_restores_what_was_copied_from_a_disk(bucket: Place, tmp_path: Path) -> None:
    with ckpt.sync.CheckpointManager(tmp_path / "a") as mgr:
        mgr.save(1, state(1), metrics={"loss": 1.0})
    copied(tmp_path / "a", bucket.root("run"))
    found = orbax(bucket, "manager", 1)
    assert found["steps"] == [1]
    assert found["metrics"] == {"loss": 1.0}
    assert found["plain"] == found["target"] == sums(1)


def test_its_manager_lists_and_restores_them(bucket: Place) -> None:
    save(bucket, 1, 2, 3)
    found = orbax(bucket, "manager", 1)
    assert found["steps"] == [1, 2, 3]
    assert (found["latest"], found["best"]) == (3, 2)
    assert found["metrics"] == {"loss": 1.0}
    assert found["shape"] == [1000]
    assert found["plain"] == found["target"] == sums(1)


def test_what_takes_a_path_reads_them(bucket: Place) -> None:
    save(bucket, 7)
    found = orbax(bucket, "paths", 7)
    assert found.pop("v1 metadata") == [1000]
    assert found == dict.fromkeys(("standard", "target", "tree", "v1"), sums(7))


def test_the_newer_interface_lists_and_loads_them(bucket: Place) -> None:
    save(bucket, 1, 2)
    found = orbax(bucket, "newer", 2)
    assert found["steps"] == [1, 2]
    assert found["metrics"] == [{"loss": 1.0}, {"loss": 0.0}]
    assert found["state"] == sums(2)


def test_both_take_turns_in_one_root(bucket: Place) -> None:
    assert orbax(bucket, "save", 1)["before"] is None
    for step in (2, 4):
        with ckpt.sync.CheckpointManager(bucket.root("run")) as mgr:
            begin, found = mgr.resume(lambda: state(0))
            assert begin == step
            assert np.array_equal(found["w"], np.arange(1000.0) + step - 1)
            mgr.save(step, state(step), durable=True)
        assert orbax(bucket, "save", step + 1)["before"] == sums(step)
    with ckpt.sync.CheckpointManager(bucket.root("run"), mode="r") as mgr:
        assert mgr.all_steps() == [1, 2, 3, 4, 5]


def test_what_its_retention_deletes_is_gone(bucket: Place) -> None:
    save(bucket, 1, 2)
    assert orbax(bucket, "keep_two", 3)["steps"] == [2, 3]
    with ckpt.sync.CheckpointManager(bucket.root("run")) as mgr:
        assert mgr.all_steps() == [2, 3]
    assert not [key for key in bucket.objects() if key.startswith("run/1/")]


def test_a_step_without_one_item_is_read_as_well(bucket: Place) -> None:
    with ckpt.sync.CheckpointManager(bucket.root("run")) as mgr:
        items = {"default": state(5), "more": {"big": jnp.ones(500)}}
        mgr.save(5, items=items, durable=True)
        mgr.delete(5, item="more")
    assert orbax(bucket, "paths", 5)["tree"] == sums(5)


def test_a_step_that_was_deleted_or_never_finished_is_not_found(bucket: Place) -> None:
    save(bucket, 1, 2)
    with ckpt.sync.CheckpointManager(bucket.root("run")) as mgr:
        mgr.delete(1)
    bucket.put("run/9/_CHECKPOINT_METADATA", b"{}")
    bucket.put("run/8/0123456789abcdef0123456789abcdef/default/d/x", b"1")
    assert orbax(bucket, "manager", 2)["steps"] == [2]


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(errors.InvalidArgumentError, match=r"NameFormat\(reads_from=3\): .*a path"):
        ckpt.orbax.NameFormat(reads_from=3)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidArgumentError, match="step_names"):
        ckpt.orbax.NameFormat("ckpt")  # type: ignore[arg-type]
