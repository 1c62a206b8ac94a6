"""Every public name has a page in the reference, and a reader finds it there."""

from __future__ import annotations

import re

import pytest

import ckpt
from tests.support.paths import ROOT

REFERENCE = ROOT / "docs" / "reference"
# What `dir()` shows: the names of `ckpt.__all__` and the public modules beside them.
NAMES = sorted({*ckpt.__all__, *dir(ckpt)})


def test_every_page_is_that_of_a_public_name() -> None:
    assert sorted(page.stem for page in (REFERENCE / "api").iterdir()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_a_page_that_the_overview_and_the_navigation_lead_to(name: str) -> None:
    page = (REFERENCE / "api" / f"{name}.md").read_text(encoding="utf-8")
    assert page.startswith(f"::: ckpt.{name}\n")
    overview = (REFERENCE / "index.md").read_text(encoding="utf-8")
    assert f"| [`ckpt.{name}`](api/{name}.md) |" in overview
    navigation = (REFERENCE / ".nav.yml").read_text(encoding="utf-8")
    assert re.search(rf"^ +- {name}: api/{name}\.md$", navigation, re.MULTILINE)
