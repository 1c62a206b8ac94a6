"""Saved by one process, restored by jobs of 2 and 4: the right bits, and each reads its share."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import ckpt
import ckpt.sync
from tests.support.real_jobs import Result, run_processes, started

LARGE = (512, 1024)
# Shape and dtype of everything that is saved; the children know it from a file.
KINDS: dict[str, tuple[tuple[int, ...], str]] = {
    "rows": (LARGE, "float32"),
    "columns": (LARGE, "float32"),
    "tiles": (LARGE, "float32"),
    "partly": ((256, 512), "int32"),
    "everywhere": (LARGE, "float32"),
    "small": ((8, 16), "float32"),
    "scalar": ((), "float32"),
    "keys": ((4, 2), "uint32"),
    "host": ((64, 8), "uint8"),
    "empty": ((8, 0), "float32"),
    "of the first": ((512, 256), "float32"),
    "small of the first": ((4,), "float32"),
    "cast": (LARGE, "float32"),
    "numpy": ((300, 7), "int16"),
    "left out": ((3,), "float32"),
}
NBYTES = 4 * LARGE[0] * LARGE[1]


def values(name: str) -> np.ndarray[Any, Any]:
    shape, dtype = KINDS[name]
    flat = np.arange(int(np.prod(shape))) % 251 + len(name)
    return flat.astype(dtype).reshape(shape)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved by this process, with 8 devices."""
    root = tmp_path_factory.mktemp("saved")
    (root / "dtypes.json").write_text(json.dumps(KINDS))
    devices = np.array(jax.devices())
    eight = Mesh(devices.reshape(2, 4), ("x", "y"))
    layouts = {
        "rows": NamedSharding(eight, P(("y", "x"))),
        "columns": NamedSharding(eight, P(None, ("x", "y"))),
        "tiles": NamedSharding(eight, P("x", "y")),
        "partly": NamedSharding(eight, P("y", "x")),
        "everywhere": NamedSharding(eight, P()),
    }
    tree: dict[str, Any] = {
        name: jax.device_put(values(name), layouts.get(name)) for name in KINDS if name != "numpy"
    }
    tree["keys"] = jax.random.wrap_key_data(jnp.asarray(values("keys")))
    tree |= {"numpy": values("numpy"), "counter": 7, "weak": jnp.asarray(2.5)}
    ckpt.sync.save(root / "x", tree)
    four = Mesh(devices[:4].reshape(4), ("x",))
    own = {
        "rows": jax.device_put(values("rows"), NamedSharding(four, P("x"))),
        "small": jax.device_put(values("small"), NamedSharding(four, P(None, "x"))),
        "scalar": jax.device_put(values("scalar"), SingleDeviceSharding(devices[1])),
        "partly": jnp.asarray(values("partly")),
        "of the first": jax.device_put(
            values("of the first"), NamedSharding(Mesh(devices[:2], ("x",)), P("x"))
        ),
    }
    ckpt.sync.save(root / "y", own)
    return root


@pytest.fixture(scope="module")
def two(root: Path) -> list[Result]:
    """What two processes with two devices each found."""
    return run_processes(2, "restore_in_job.py", root, "targets", "untold")


@pytest.fixture(scope="module")
def four(root: Path) -> list[Result]:
    """What four processes with a device each found."""
    phases = ("shares", "targets", "untold")
    with started(4, "restore_in_job.py", root, *phases, devices_per_process=1) as job:
        # Process 0 has not even begun when the others have read everything.
        for child in job.children[1:]:
            child.reached("has read")
        job[0].reached("others have read")
        for child in job.children:
            child.go_on()
        results = job.results()
    for result in results:
        assert result.code == 0, result.errors
    return results


@pytest.mark.parametrize("job", ["two", "four"])
def test_every_process_gets_its_parts_of_every_target(
    job: str, request: pytest.FixtureRequest
) -> None:
    names = ("rows", "tiles", "everywhere", "small")
    total = sum(values(name).astype(np.float64).sum() for name in names)
    for result in request.getfixturevalue(job):
        value = result.value["targets"]
        assert value["problems"] == []
        assert all(value["checks"].values()), value["checks"]
        assert value["total"] == pytest.approx(total, rel=1e-5)
        assert value["warnings"] == []
        # Not one program: another process may be anywhere in its own.
        assert value["programs"] == []


def test_every_process_reads_its_share_and_waits_for_no_other(four: list[Result]) -> None:
    share = NBYTES // len(four)
    # Its rows are on two of the devices.
    half = math.prod(KINDS["partly"][0]) * 4 // 2
    for result in four:
        assert result.value["shares"] == {
            "rows": share,
            "columns": share,
            "tiles": share,
            "partly": half,
            "everywhere": NBYTES,
        }


def test_without_a_target_every_process_has_a_part_of_everything(two: list[Result]) -> None:
    """Devices of all processes; and of one, which are every process's own."""
    for result in two:
        value, index = result.value["untold"], result.index
        assert value["problems"] == []
        everywhere = ["0.0", "0.1", "1.0", "1.1"]
        own = [f"{index}.0", f"{index}.1"]
        assert value["devices"] == {
            "rows": everywhere,
            "small": everywhere,
            "scalar": own[1:],
            "partly": own[:1],
            "of the first": own,
        }
        assert value["specs"]["rows"] == ["x"]
        assert value["specs"]["of the first"] == ["x"]
        assert value["committed"] == {name: name != "partly" for name in value["devices"]}
        assert value["warnings"] == []


def test_arrays_on_devices_of_some_processes_come_to_those_of_all(
    four: list[Result],
) -> None:
    for result in four:
        value, index = result.value["untold"], result.index
        assert value["problems"] == []
        # Four devices are all of them again; two are of two processes, and one is everybody's own.
        assert value["devices"]["rows"] == ["0.0", "1.0", "2.0", "3.0"]
        assert value["devices"]["scalar"] == [f"{index}.0"]
        assert value["devices"]["of the first"] == ["0.0", "1.0", "2.0", "3.0"]
        assert value["specs"]["of the first"] == ["x"]
        (warning,) = value["warnings"]
        assert "1 (of the first): its mesh x=2 is x=4 on the devices here" in warning


def test_a_second_start_has_the_places_of_the_first(tmp_path: Path) -> None:
    for result in run_processes(2, "resume_in_job.py", tmp_path):
        assert result.value["warnings"] == []
        for name, (first, *others) in result.value["found"].items():
            assert all(each == first for each in others), name
