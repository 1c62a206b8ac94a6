"""Conformance suites for handlers and stores of other packages, run on real checkpoints.

`check_handler` and `check_store` run every check of a `HandlerCase` or a `StoreCase`. With pytest,
one test for each of `HANDLER_CHECKS` or `STORE_CHECKS` is better: a failure then has the name of
the broken promise.

```python
@pytest.mark.parametrize("check", HANDLER_CHECKS, ids=lambda check: check.__name__)
def test_my_handler(check, tmp_path):
    check(HandlerCase(MyHandler(), make=MyThing, same=operator.eq), tmp_path)

def fresh():
    url = f"mystore://bucket/{uuid.uuid4().hex}"
    return lambda timeouts: open_root(MyStore(url), timeouts)

@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
def test_my_store(check):
    anyio.run(check, StoreCase(fresh))
```
"""

from __future__ import annotations

from ckpt.testing.conformance.handlers import CHECKS as HANDLER_CHECKS
from ckpt.testing.conformance.handlers import HandlerCase, check_handler
from ckpt.testing.conformance.stores import CHECKS as STORE_CHECKS
from ckpt.testing.conformance.stores import StoreCase, check_store

__all__ = [
    "HANDLER_CHECKS",
    "STORE_CHECKS",
    "HandlerCase",
    "StoreCase",
    "check_handler",
    "check_store",
]
