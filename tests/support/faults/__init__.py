"""File operations of this process that fail, are cut short, or wait, and a record of all of them.

`FaultyFiles` watches a directory and follows a plan. `at`, `since`, `every`, `named`, `refused_by`
and `first_of` make plans; `Fail`, `Short`, `Wait` and `Crash` are their effects.

```python
from tests.support.faults import Fail, FaultyFiles, at

with FaultyFiles(tmp_path, at(7, Fail(errno.ENOSPC))) as files:
    with pytest.raises(ckpt.errors.StorageError):
        ckpt.sync.save(tmp_path / "run", state)
for operation in files.operations:
    print(operation)
```

To try a fault at every operation, count up until a run completes without a fault:

```python
for number in itertools.count(1):
    with FaultyFiles(root, at(number, Crash())) as files:
        save_and_check(root)
    if not files.met:
        break
```
"""

from __future__ import annotations

from tests.support.faults.files import FaultyFiles
from tests.support.faults.plans import (
    CHANGES,
    SYNCS,
    WRITES,
    Crash,
    Effect,
    Fail,
    FileOperation,
    Plan,
    Predicate,
    Short,
    Wait,
    at,
    every,
    first_of,
    named,
    refused_by,
    since,
)

__all__ = [
    "CHANGES",
    "SYNCS",
    "WRITES",
    "Crash",
    "Effect",
    "Fail",
    "FaultyFiles",
    "FileOperation",
    "Plan",
    "Predicate",
    "Short",
    "Wait",
    "at",
    "every",
    "first_of",
    "named",
    "refused_by",
    "since",
]
