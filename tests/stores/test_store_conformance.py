"""Every store does what the public suite asks of stores."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from ckpt.testing.conformance import STORE_CHECKS, store_step_dirs, store_writers
from tests.stores.places import Place, case_of


@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
def test_a_store_conforms(store: Place, check: Any) -> None:
    anyio.run(check, case_of(store))


def test_every_check_is_among_those_that_are_run() -> None:
    found = {
        name
        for module in (store_step_dirs, store_writers)
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__
        and not name.startswith("_")
        and callable(value)
    }
    assert {check.__name__ for check in STORE_CHECKS} == found
