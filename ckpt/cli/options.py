"""Arguments and options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

# Shells complete it as a path. It stays the given text, since it may be a URL; later code checks
# the path, with better messages.
PATH = click.Path(readable=False)

path: Callable[[F], F] = click.argument("path", type=PATH)
root: Callable[[F], F] = click.argument("root", type=PATH)
as_json: Callable[[F], F] = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON instead of text."
)
trash: Callable[[F], F] = click.option(
    "--trash", metavar="NAME", help="The trash, a folder of the root or a path; else the run's."
)
for_good: Callable[[F], F] = click.option(
    "--for-good", is_flag=True, help="Remove steps also if there is a trash."
)
dry_run: Callable[[F], F] = click.option(
    "--dry-run", is_flag=True, help="Say what would be done; change nothing."
)


def share(_: click.Context, __: click.Parameter, value: str | None) -> float | None:
    """Return a share such as `5%` or `0.05` as a number above 0, up to 1."""
    if value is None:
        return None
    text = value.strip()
    try:
        found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        found = math.nan
    if not 0 < found <= 1:
        raise click.BadParameter(f"expected a share such as 5% or 0.05, not {value!r:.60}.")
    return found
