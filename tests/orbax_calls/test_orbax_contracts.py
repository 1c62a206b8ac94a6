"""`ckpt_orbax` does what Orbax does, contract by contract."""

from __future__ import annotations

from pathlib import Path

import orbax.checkpoint as ocp
import pytest

import ckpt_orbax.v1
from tests.interop.contracts.runners import on_orbax
from tests.interop.contracts.table import CONTRACTS as TABLE
from tests.interop.contracts.table import Contract as TableContract
from tests.orbax_calls import (
    arguments,
    checkpointers,
    leaves,
    managers,
    newer,
    refusals,
    runs,
    steps,
)
from tests.orbax_calls.contracts import CONTRACTS, Contract, outcomes
from tests.support.paths import ROOT

MODULES = (managers, leaves, arguments, runs, checkpointers, newer, refusals, steps)
# Orbax closes loops late after an error.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.parametrize("each", CONTRACTS.values(), ids=lambda it: it.name)
def test_a_contract(each: Contract, tmp_path: Path) -> None:
    theirs = outcomes(each, ocp, tmp_path / "orbax")
    for number, outcome in each.differs.items():
        assert theirs[number] != outcome, "Orbax does the same now"
        theirs[number] = outcome
    assert outcomes(each, ckpt_orbax, tmp_path / "ckpt") == theirs


@pytest.mark.parametrize("each", TABLE, ids=lambda it: it.name.replace(" ", "-"))
def test_a_contract_of_the_table(each: TableContract, tmp_path: Path) -> None:
    theirs = on_orbax(each, tmp_path / "orbax", ocp)
    assert on_orbax(each, tmp_path / "ckpt", ckpt_orbax) == theirs


def test_the_page_counts_them_and_names_those_that_differ() -> None:
    page = " ".join((ROOT / "docs" / "how-to" / "orbax-in-one-line.md").read_text().split())
    apart = [each for each in CONTRACTS.values() if each.why]
    total = len(CONTRACTS) + len(TABLE)
    refused = sum(each.is_refused for each in apart)
    assert f"run {total} contracts" in page
    assert (
        f"{total - len(apart)} hold, {len(apart) - refused} differ, and {refused} are refused"
    ) in page
    for each in apart:
        assert each.why in page, each.name
