"""The contracts of Orbax's manager hold here, or differ as the table of contracts says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interop.contracts.runners import here, on_orbax
from tests.interop.contracts.table import CONTRACTS, Contract
from tests.support.paths import ROOT


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda it: it.name.replace(" ", "-"))
def test_a_contract_of_orbax(contract: Contract, tmp_path: Path) -> None:
    theirs = on_orbax(contract, tmp_path / "orbax")
    expected = list(theirs)
    if contract.differs is not None:
        for number, outcome in contract.differs.outcomes.items():
            assert expected[number] != outcome, "Orbax does the same now"
            expected[number] = outcome
    assert here(contract, tmp_path / "here") == expected


def test_the_page_counts_them() -> None:
    page = " ".join((ROOT / "docs" / "how-to" / "migrating-from-orbax.md").read_text().split())
    differ = sum(contract.differs is not None for contract in CONTRACTS)
    hold = len(CONTRACTS) - differ
    assert f"{len(CONTRACTS)} contracts of Orbax's manager" in page
    assert f"{hold} hold here as they are, and {differ} differ" in page
    assert len({contract.name for contract in CONTRACTS}) == len(CONTRACTS)
