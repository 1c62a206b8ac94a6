"""Vital signs of joint saves are those of a save by one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ckpt
from ckpt._vitals.signs import SIGNS
from ckpt._vitals.stored_signs import signs_in
from ckpt.extensions import VitalSigns
from tests.support.real_jobs import run_processes
from tests.support.simulated_job import closed, managers, saved, steps

DEVICES = {1: 4, 2: 2, 4: 1}


def records(path: Path) -> dict[str, np.ndarray]:
    data = (path / "ckpt.json").read_bytes()
    table = ckpt.manifest.decode(data, where=str(path)).items["default"].leaves
    arrays = [
        name for name, form in zip(table.names, table.form, strict=True) if table.forms[form].dtype
    ]
    assert "vital_signs" in table.extensions
    found = signs_in(table).records
    return {name: found[table.names.index(name)] for name in arrays}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process saves: with signs by its host, and by its devices."""
    return saved_in_a_job(1, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def of_one_process(one_process: Path) -> dict[str, np.ndarray]:
    """What the host of one process finds."""
    return records(one_process / "host" / "3")


def saved_in_a_job(count: int, root: Path) -> Path:
    given = ("roundtrip", root, "host", "device")
    run_processes(count, "save_in_job.py", *given, devices_per_process=DEVICES[count])
    return root


@pytest.mark.parametrize("count", [1, 2, 4])
def test_jobs_of_one_two_and_four_processes_agree(
    tmp_path: Path, one_process: Path, of_one_process: dict[str, np.ndarray], count: int
) -> None:
    root = one_process if count == 1 else saved_in_a_job(count, tmp_path)
    for mode in ("host", "device"):
        found = records(root / mode / "3")
        assert len(found) == 12
        assert found.keys() == of_one_process.keys()
        for name, record in found.items():
            for sign in SIGNS.names or ():
                np.testing.assert_allclose(
                    record[sign],
                    of_one_process[name][sign],
                    rtol=1e-5 if sign == "norm" else 0,
                    err_msg=f"{sign} of {name} by the {mode}",
                )


def test_a_process_may_have_no_part_of_an_array(tmp_path: Path) -> None:
    run_processes(3, "save_in_job.py", "elsewhere", tmp_path, devices_per_process=1)
    values = np.arange(512 * 1024, dtype=np.int64) * 7 + len("elsewhere") + 1
    array = (values % 239).astype(np.float32).reshape(512, 1024)
    alone = tmp_path / "alone"
    ckpt.sync.save(alone, {"elsewhere": array}, extensions=[ckpt.extensions.VitalSigns()])
    assert np.array_equal(ckpt.sync.load(tmp_path / "1")["elsewhere"], array)
    found, expected = (records(path)["elsewhere"] for path in (tmp_path / "1", alone))
    assert (found["fingerprint"] == expected["fingerprint"]).all()


@pytest.mark.parametrize("without", [0, 1])
def test_processes_with_another_switch_save_no_wrong_signs(tmp_path: Path, without: int) -> None:
    state = {"a": np.arange(10, dtype=np.int32), "b": 3}
    signs = [ckpt.extensions.VitalSigns()]
    each = [{"extensions": signs if index != without else []} for index in range(2)]
    mgrs = managers(tmp_path, each=each)
    assert steps(saved(mgrs, 1, state)) == [1, 1]
    closed(mgrs)
    found = VitalSigns.of(ckpt.sync.metadata(tmp_path / "1").tree["a"])
    assert (None if found is None else found.absmax) == (None if without == 0 else 9)


def test_on_disks_of_their_own_every_process_has_those_of_what_it_has_whole(
    tmp_path: Path, of_one_process: dict[str, np.ndarray]
) -> None:
    root = tmp_path / "root"
    run_processes(2, "save_in_job.py", "apart", root, "save", 3, devices_per_process=2)
    divided = {"rows", "large rows", "columns", "tiles", "small"}
    for disk in (root / "disk 0", root / "disk 1"):
        found = records(disk / "3")
        for name, record in found.items():
            is_known = record["norm"] >= 0
            assert is_known == (name not in divided), name
            if is_known:
                assert (record["fingerprint"] == of_one_process[name]["fingerprint"]).all()


# The processes that have other replicas, step by step, and those that are named.
DRIFTS: dict[int, list[tuple[str, tuple[int, ...]]]] = {
    3: [("1", (1,)), ("0", (0,)), ("none", ())],
    2: [("1", (0, 1))],
}


@pytest.mark.parametrize("count", DRIFTS)
def test_processes_whose_replicas_differ_are_named(tmp_path: Path, count: int) -> None:
    which = [each for each, _ in DRIFTS[count]]
    found = run_processes(
        count, "save_in_job.py", "drifting", tmp_path, *which, devices_per_process=1
    )
    for step, (each, named) in enumerate(DRIFTS[count], 1):
        told = [child.values[step - 1] for child in found]
        # All are told alike, whichever publishes.
        assert [of["unequal"] for of in told] == [int(bool(named))] * count, each
        assert told[0]["ok"], each
        tree = ckpt.sync.metadata(tmp_path / str(step)).tree
        assert {name: VitalSigns.unequal_on(leaf) for name, leaf in tree.items()} == {
            "good": (),
            "bad": named,
            "own": (),
        }, each


def test_one_process_of_a_job_tells_of_values_that_are_not_finite(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mgrs = managers(tmp_path, extensions=[ckpt.extensions.VitalSigns()])
    assert steps(saved(mgrs, 1, {"a": np.full(2, np.nan)})) == [1, 1]
    closed(mgrs)
    found = [each.getMessage() for each in caplog.records if "NaN or" in each.getMessage()]
    assert found == ["step 1 was saved with NaN or infinite values in 1 leaf: a (2)"]
