"""The commands: one module for each, with a click command of the same name.

A module is imported when its command runs, so that a command that reads manifests need not wait for
imports of another command. Modules that move arrays are imported in functions, since `--help`
imports all commands.
"""

from __future__ import annotations

import importlib
import itertools

import click

# As the help shows them.
GROUPS = {
    "Look": ("ls", "show", "watch", "ui", "stats", "trace"),
    "Compare": ("diff", "bisect", "verify", "drill"),
    "Move": ("cp", "convert", "merge"),
    "Tidy": ("rm", "trash", "gc", "pin"),
    "This machine": ("doctor", "completion"),
}
# What users may know by another name.
RENAMED = {
    "adopt": "convert --in-place",
    "du": "ls --by-size",
    "forget": "rm --keep-last N",
    "info": "show",
    "log": "ls --long",
    "norms": "ui",
    "tree": "show",
    "undelete": "trash --restore STEP",
    "unpin": "pin --remove",
}
NAMES = tuple(itertools.chain.from_iterable(GROUPS.values()))


def load(name: str) -> click.Command:
    """Return the command of a name."""
    found: click.Command = getattr(importlib.import_module(f"{__name__}.{name}"), name)
    return found
