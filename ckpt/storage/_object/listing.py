"""The list of step directories in an object store.

A store lists objects, not folders, so a list grows with the number of files in all steps. Therefore
a large root is listed completely only now and then. In between, only the names are listed: objects
that writers of this library leave beside the steps before they commit them. Steps that other tools
copy into a large root are found a little later.
"""

from __future__ import annotations

import time

from ckpt._format.manifest_head import FILE_NAME
from ckpt.storage._object.foreign import MARKS
from ckpt.storage._object.leases import record_names
from ckpt.storage._object.names import NAMES
from ckpt.storage._store import Store

# Keys that a store returns at a time; a list of fewer takes one request in any case.
_ONE_REQUEST = 1000
_LEAST_SECONDS = 60.0
# Largest share of the time that listing the whole root may take.
_SHARE = 0.01
_OWN = ".ckpt-"
# Files that make a directory a step.
_MARKS = frozenset({FILE_NAME, *MARKS})


class StepListing:
    """Lists the step directories of one root. Its coroutines run on one event loop."""

    def __init__(self, keys: Store) -> None:
        self._keys = keys
        # Step directories without a name from their writer: other tools copied them there.
        self._copied: frozenset[str] = frozenset()
        self._next = 0.0

    async def step_dirs(self) -> list[str]:
        """Return the names of the step directories that have, or had a moment ago, a manifest.

        A step that Orbax has marked counts, too, and an object whose name ends in a number, like
        the steps of Flax.
        """
        if time.monotonic() < self._next:
            names = await self._keys.list(f"{NAMES}/")
            return sorted(self._copied | _step_dirs_of(names))
        began = time.monotonic()
        found = await self._keys.list("")
        start = f"{NAMES}/"
        named = _step_dirs_of([key.removeprefix(start) for key in found if key.startswith(start)])
        pairs = [key.split("/") for key in found]
        there = {pair[0] for pair in pairs if len(pair) == 2 and pair[1] in _MARKS}
        there |= {pair[0] for pair in pairs if len(pair) == 1 and pair[0][-1:].isdecimal()}
        there = {name for name in there if not name.startswith(_OWN)}
        self._copied = frozenset(there - named)
        if len(found) >= _ONE_REQUEST:
            now = time.monotonic()
            self._next = now + max(_LEAST_SECONDS, (now - began) / _SHARE)
        return sorted(there)


def _step_dirs_of(names: list[str]) -> set[str]:
    return {found[0] for name in names if (found := record_names(name)) is not None}
