"""Output of the command: records as text for people, or as JSON for programs."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable
from typing import TypeVar

import click
import msgspec

from ckpt._inspection.json_values import json_text

T = TypeVar("T")
# The line that is shown until anything else is printed; empty if there is none.
_shown: list[str] = []


def show(record: T, view: Callable[[T], Iterable[str]], *, as_json: bool) -> None:
    """Print a record, as JSON or as the lines of `view` for people."""
    if as_json:
        show_json(record)
    else:
        show_lines(view(record))


def show_lines(lines: Iterable[str]) -> None:
    """Print lines. Styles are used only on a terminal, and not if `NO_COLOR` is set."""
    text = "".join(f"{line}\n" for line in lines)
    hide_line()
    # Not click.echo, which would send UTF-8 to a terminal whose encoding is ASCII.
    sys.stdout.write(text if _takes_styles() else click.unstyle(text))
    sys.stdout.flush()


def _takes_styles() -> bool:
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))


def show_json(record: object) -> None:
    """Print one JSON document, on one line if it goes to a program."""
    hide_line()
    encoded = json_text(record)
    if sys.stdout.isatty():
        encoded = msgspec.json.format(encoded)
    sys.stdout.write(encoded + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """Print a message that is not the result to standard error."""
    hide_line()
    sys.stderr.write(f"{printable(text)}\n")


def show_line(text: str) -> None:
    """Show a line on standard error until the next one, or until anything else is printed."""
    # The carriage return first ensures that no line is ever left above.
    sys.stderr.write(f"\r{text}\x1b[K")
    sys.stderr.flush()
    _shown.append(text)
    del _shown[:-1]


def hide_line() -> None:
    """Remove the line of `show_line`."""
    if _shown:
        _shown.clear()
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def printable(text: str) -> str:
    """Return a text from a checkpoint as one line that cannot change the terminal."""
    return text if text.isprintable() else repr(text)[1:-1]


def prepare_streams() -> None:
    """Make streams escape characters that the terminal lacks, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


class Warnings(logging.Handler):
    """Prints the warnings of the library as lines on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one warning."""
        note(f"{record.levelname.lower()}: {record.getMessage()}")
