"""llms.txt leads to pages that exist, and to every page that is not generated."""

from __future__ import annotations

import re

from tests.support.paths import ROOT

DOCS = ROOT / "docs"
TEXT = (DOCS / "llms.txt").read_text(encoding="utf-8")
LINKS = re.findall(r"^- \[[^\]]+\]\(([^)]+)\): \S", TEXT, re.MULTILINE)


def test_it_has_the_form_of_the_proposal() -> None:
    title, _, summary = TEXT.splitlines()[:3]
    assert title == "# ckpt"
    assert summary.startswith("> ")
    assert len(LINKS) == len(re.findall(r"\]\(", TEXT)) == len(set(LINKS))


def test_its_links_lead_to_pages() -> None:
    assert [link for link in LINKS if not (DOCS / link).is_file()] == []


def test_it_has_every_tutorial_guide_and_explanation() -> None:
    pages = {
        page.relative_to(DOCS).as_posix()
        for folder in ("tutorials", "how-to", "explanation")
        for page in (DOCS / folder).rglob("*.md")
    }
    assert pages - set(LINKS) == set()
