"""The commands: one module for each, with a click command of the same name.

A module is imported when its command runs, so that a command that reads manifests need not wait for
imports of another command. Modules that move arrays are imported in functions, since `--help`
imports all commands.
"""

from __future__ import annotations

import importlib

import click

# In the order of the help.
NAMES = (
    "ls",
    "info",
    "tree",
    "show",
    "diff",
    "bisect",
    "du",
    "explain",
    "log",
    "verify",
    "cp",
    "convert",
    "adopt",
    "merge",
    "rm",
    "forget",
    "undelete",
    "gc",
    "pin",
    "unpin",
    "watch",
    "norms",
    "stats",
    "goodput",
    "trace",
    "ui",
    "bench",
    "doctor",
    "completion",
)


def load(name: str) -> click.Command:
    """Return the command of a name."""
    found: click.Command = getattr(importlib.import_module(f"{__name__}.{name}"), name)
    return found
