"""Programs that know nothing of `ckpt_orbax` train by it, are killed, and go on.

Each runs as it is on the package index, by Orbax and by `ckpt_orbax`. The session `programs` of nox
installs them; its name keeps this file out of all other sessions.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tests.programs_of_others.catalogue import PAGE, PROGRAMS, with_table
from tests.programs_of_others.runs import LINE, OTHERS, OURS, Outcome, killed, program, run

# The runs of a program share what they compile, so one worker makes them.
each_program = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in PROGRAMS]
)
LIBRARIES = (OTHERS, OURS)

Whole = Callable[[str, str], Outcome]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Returns how a run ends that is not killed, by program and library."""
    return cache(lambda name, library: run(name, library, tmp_path_factory.mktemp(name) / library))


def assert_near(name: str, found: Outcome, whole: Outcome) -> None:
    """Checks that a run has ended as the one that was never killed; meshes add up differently."""
    error = PROGRAMS[name].error
    assert found.start > whole.start
    for step, loss in found.losses.items():
        np.testing.assert_allclose(loss, whole.losses[step], rtol=error)
    np.testing.assert_allclose(found.sums, whole.sums, rtol=10 * error, atol=error)


def test_the_page_has_the_programs() -> None:
    assert with_table(PAGE.read_text("utf-8")) == PAGE.read_text("utf-8")


@each_program
def test_one_line_is_added(name: str) -> None:
    theirs, ours = (program(name, library).splitlines() for library in LIBRARIES)
    assert ours == [LINE, *theirs]


@each_program
def test_a_whole_run_is_the_same(name: str, whole: Whole) -> None:
    assert whole(name, OURS) == whole(name, OTHERS)


@each_program
def test_a_run_that_orbax_saved_goes_on_by_both(name: str, whole: Whole, tmp_path: Path) -> None:
    killed(name, OTHERS, tmp_path / "killed", 5)
    theirs, ours = (resumed(name, library, tmp_path) for library in LIBRARIES)
    assert ours == theirs
    assert_near(name, ours, whole(name, OTHERS))


@each_program
def test_a_killed_run_goes_on(name: str, whole: Whole, tmp_path: Path) -> None:
    killed(name, OURS, tmp_path / "killed", 5)
    ours = resumed(name, OURS, tmp_path)
    assert_near(name, ours, whole(name, OTHERS))
    if not PROGRAMS[name].no_way_back:
        assert resumed(name, OTHERS, tmp_path) == ours


def resumed(name: str, library: str, folder: Path) -> Outcome:
    """Returns how a killed run ends on its other devices."""
    shutil.copytree(folder / "killed", folder / library)
    return run(name, library, folder / library, PROGRAMS[name].devices)


@each_program
def test_a_run_begun_by_orbax_changes_its_devices_twice(
    name: str, whole: Whole, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    killed(name, OTHERS, root, 3)
    killed(name, OURS, root, 6, PROGRAMS[name].devices)
    assert_near(name, run(name, OURS, root), whole(name, OTHERS))
