"""What jobs ask a store for when they start: how often, and by how many processes.

`python -m benchmarks.starts` starts jobs of 1, 2 and 4 processes on SeaweedFS, behind a proxy for
each process. `--page docs/how-to/multi-process.md` writes the table into a page.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from benchmarks.figures import table, write_between
from tests.stores import servers

START, END = "<!-- starts:start -->", "<!-- starts:end -->"
COUNTS = (1, 2, 4)
TEXT = (
    "Requests of jobs of 1, 2 and 4 processes, all of them together; and how much data they read. "
    "The state has 0.7 MB: 0.3 MB are cut over the devices, and all processes need the rest.\n\n"
)


def rows(port: int) -> list[tuple[str, ...]]:
    """Return a row for every call."""
    from tests.stores.job_starts import CALLS, DAMAGED, OPENING, Asked, starts_of
    from tests.stores.places import Place

    found: dict[int, dict[str, list[Asked]]] = {}
    for count in COUNTS:
        place = Place("seaweed", f"ckpt-starts-{count}", "", port, None, None)
        place.boto().create_bucket(Bucket=place.bucket)
        found[count] = starts_of(place, count)

    def cells(call: str) -> tuple[str, ...]:
        every = [found[count][call] for count in COUNTS]
        kinds = [
            [sum(getattr(asked, kind) for asked in each) for each in every]
            for kind in ("listings", "manifests", "others")
        ]
        data = [sum(asked.nbytes for asked in each) for each in every]
        megabytes = [f"{nbytes / 1e6:.1f}" for nbytes in data] if any(data) else ["-"]
        return tuple(", ".join(map(str, part)) for part in (*kinds, megabytes))

    shown = [OPENING, *(call for call in CALLS if not call.endswith("alone") and call != DAMAGED)]
    return [(f"`{call}`" if "(" in call else call, *cells(call)) for call in shown]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, help="the page whose table is made anew")
    chosen = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.update(servers.environment())
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        del os.environ[name]
    with servers.seaweed() as port:
        head = ("", "lists of the root", "reads of manifests", "other requests", "data, MB")
        text = TEXT + table(head, rows(port))
    sys.stdout.write(text + "\n")
    if chosen.page:
        write_between(chosen.page, START, END, text)


if __name__ == "__main__":
    main()
