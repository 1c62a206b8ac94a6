"""Every error has an entry on the page about troubleshooting, with its built-in base class."""

from __future__ import annotations

import inspect
import re

import pytest

from ckpt import errors
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "how-to" / "troubleshooting.md"
CLASSES = [each for name in errors.__all__ if inspect.isclass(each := getattr(errors, name))]


def entries() -> dict[str, str]:
    """Return the text of the entries by the name of the class, in the order of the page."""
    _, _, section = PAGE.read_text(encoding="utf-8").partition("\n## By error\n")
    section, _, _ = section.partition("\n## ")
    parts = re.split(r"^### `(\w+)`", section, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_an_error_has_an_entry_that_says_what_to_do(error: type[Exception]) -> None:
    heading, _, text = entries()[error.__name__].partition("\n")
    bases = [base.__name__ for base in error.__bases__ if base is not errors.CheckpointError]
    expected = bases[-1] if bases and error is not errors.CheckpointError else None
    assert heading.strip() == (f"(`{expected}`)" if expected else "")
    assert len(text.split()) >= 10


def test_entries_are_about_errors_that_there_are() -> None:
    for name in entries():
        assert issubclass(getattr(errors, name), errors.CheckpointError)
