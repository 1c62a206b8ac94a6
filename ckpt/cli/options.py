"""Arguments and options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

# Shells complete it as a path; it stays the text that was given, since it may be a URL. What is
# there is looked at later, by what says more of it.
PATH = click.Path(readable=False)

path: Callable[[F], F] = click.argument("path", type=PATH)
root: Callable[[F], F] = click.argument("root", type=PATH)
as_json: Callable[[F], F] = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON instead of text."
)
trash: Callable[[F], F] = click.option(
    "--trash", metavar="NAME", help="The trash: a folder of the root or a path."
)
dry_run: Callable[[F], F] = click.option(
    "--dry-run", is_flag=True, help="Say what would be done; change nothing."
)
