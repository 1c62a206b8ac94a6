"""A conformance suite for stores: every promise of `ckpt.storage.Storage`, tried on real ones.

Each check is a coroutine function of a `StoreCase`, and raises `AssertionError` (or the error of
the store) where the store does something else. `check_store` runs them all; with pytest one test
for each is better:

```python
def fresh():
    url = f"mystore://bucket/{uuid.uuid4().hex}"
    return lambda timeouts: MyStorage(url, timeouts)

@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_my_store(check):
    anyio.run(check, StoreCase(fresh))
```
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from ckpt.testing.conformance import store_entries, store_writers
from ckpt.testing.conformance.store_cases import StoreCase

__all__ = ["CHECKS", "StoreCase", "check_store"]

CHECKS: tuple[Callable[[StoreCase], Awaitable[None]], ...] = (
    *store_entries.CHECKS,
    *store_writers.CHECKS,
)


def check_store(case: StoreCase) -> None:
    """Run every check, each in a root of its own.

    Raises:
        AssertionError: The store fails one.
        CheckpointError: The store refused what it should do.
    """
    for check in CHECKS:
        anyio.run(check, case)
