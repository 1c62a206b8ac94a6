"""The tables that pages of the documentation have between markers, and the command for them.

    python -m benchmarks.pages tiers                # measures, and prints the table
    python -m benchmarks.pages tiers --write        # and writes it into the page with its markers
    python -m benchmarks.pages --help               # every table
    python -m benchmarks.pages tiers --help         # what can be chosen

A table is a function with the name of its markers. It gets a new folder and returns Markdown; its
keywords are the options of the command.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.rounds import default_dir

if TYPE_CHECKING:
    from collections.abc import Sequence

DOCS = Path("docs")
_OF_MODULES = {
    "accelerators": ["accelerator"],
    "foreign": ["foreign"],
    "formats": ["formats"],
    "integrity": ["integrity"],
    "late_beats": ["late"],
    "losses": ["lost", "lost_jobs"],
    "object_stores": ["stores", "replicas", "starts"],
    "tiers": ["tiers", "drains"],
    "unchanged": ["unchanged"],
    "vital_signs": ["vital_signs"],
}
# The module that has a table.
TABLES = {name: module for module, names in _OF_MODULES.items() for name in names}


def updated(page: str, name: str, text: str) -> str:
    """Returns a page with this text between its two markers of that name.

    Raises:
        ValueError: The page does not have exactly one pair of these markers, in order.
    """
    start_mark, end_mark = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    before, start, rest = page.partition(start_mark)
    _, end, after = rest.partition(end_mark)
    if not start or not end or start_mark in rest or end_mark in after:
        raise ValueError(f"the page needs one {start_mark} and after it one {end_mark}")
    return f"{before}{start}\n\n{text.strip()}\n\n{end}{after}"


def page_of(name: str) -> Path:
    """Returns the page that has the markers of a table.

    Raises:
        ValueError: Not exactly one page has them.
    """
    found = [
        page for page in sorted(DOCS.rglob("*.md")) if f"<!-- {name}:start" in page.read_text()
    ]
    if len(found) != 1:
        raise ValueError(
            f"one page needs the markers <!-- {name}:start --> and <!-- {name}:end -->"
        )
    return found[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes one table, and prints it or writes it into its page."""
    given = arguments or sys.argv[1:]
    first = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=main.__doc__)
    first.add_argument("table", choices=list(TABLES))
    name: str = first.parse_args(given[:1]).table
    module = importlib.import_module(f"benchmarks.{TABLES[name]}")
    make = getattr(module, name)
    parser = argparse.ArgumentParser(prog=f"{first.prog} {name}", description=make.__doc__)
    parser.add_argument("--write", action="store_true", help=f"write it into a page of {DOCS}/")
    parser.add_argument(
        "--dir", type=Path, default=default_dir(), help="a folder on the disk to measure"
    )
    for option in inspect.signature(make).parameters.values():
        if option.kind is option.KEYWORD_ONLY:
            how: dict[str, Any] = {"type": type(option.default), "default": option.default}
            how = {"action": "store_true"} if option.default is False else how
            parser.add_argument(f"--{option.name}", help="default: %(default)s", **how)
    options = vars(parser.parse_args(given[1:]))
    write, parent = options.pop("write"), options.pop("dir")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Agents of killed programs may still be writing there when it is removed.
    with tempfile.TemporaryDirectory("", "bench-", parent, ignore_cleanup_errors=True) as place:
        text = make(Path(place), **options).strip()
    sys.stdout.write(f"{text}\n")
    if options.get("smoke"):
        sys.stdout.write("\n**Smoke run: sizes are tiny, the figures mean nothing.**\n")
    elif write:
        page = page_of(name)
        page.write_text(updated(page.read_text(encoding="utf-8"), name, text), encoding="utf-8")


if __name__ == "__main__":
    main()
