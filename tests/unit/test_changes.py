"""The files in changes/ read like the changelog that they become, and can become it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.support.paths import ROOT

FRAGMENTS = sorted((ROOT / "changes").glob("*.*.md"))
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["towncrier"]
# Those of https://keepachangelog.com, in its order.
CATEGORIES = ["added", "changed", "deprecated", "removed", "fixed", "security"]


def problems(text: str) -> list[str]:
    """Return what makes a text none for the changelog."""
    found = []
    if not text.strip():
        found.append("it says nothing")
    if re.search(r"^\s*([#*+]|- )", text, re.MULTILINE):
        found.append("a heading or a bullet: the changelog makes them")
    if text.strip() and not text.rstrip().endswith((".", "```")):
        found.append("it does not end with a full stop")
    if not text.endswith("\n") or text.endswith("\n\n"):
        found.append("it does not end with one newline")
    if re.search(r"#\d|[Ii]ssue \d|/(work|opt|tmp|home)/", text):
        found.append("a number or a path that means nothing to users")
    if any(len(line) > 120 for line in text.splitlines()):
        found.append("a line of more than 120 characters")
    return found


@pytest.mark.parametrize("path", FRAGMENTS, ids=lambda path: path.name)
def test_a_change_is_told_in_plain_sentences(path: Path) -> None:
    assert problems(path.read_text(encoding="utf-8")) == []


BAD = (
    *("", "\n", "- A bullet.\n", "### Added\n", "No full stop\n", "No newline.", "Two.\n\n"),
    *("Mends #12.\n", "As in /tmp/x.\n", f"{'long ' * 30}.\n"),
)


@pytest.mark.parametrize("text", BAD)
def test_other_texts_are_found(text: str) -> None:
    assert len(problems(text)) >= 1


def test_the_categories_are_those_of_the_changelog() -> None:
    assert list(SETTINGS["fragment"]) == CATEGORIES


def test_a_release_finds_its_place_once() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert text.count(f"## [Unreleased]\n\n{SETTINGS['start_string']}") == 1
