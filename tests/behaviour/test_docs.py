"""Every python block of the README and of the documentation runs."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from sybil import Document
from sybil.parsers.markdown import PythonCodeBlockParser

from tests.support.paths import ROOT


def pages() -> list[str]:
    """Return the pages that have python blocks, relative to the repository."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [
        page.relative_to(ROOT).as_posix()
        for page in found
        if "```python" in page.read_text(encoding="utf-8")
    ]


@pytest.mark.parametrize("page", pages())
def test_python_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run in order and in one namespace, as if typed into one script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    document = Document.parse(str(ROOT / page), PythonCodeBlockParser())
    document.namespace["__name__"] = "__main__"
    examples = list(document.examples())
    assert examples
    for example in examples:
        example.evaluate()


def test_the_pages_that_promise_examples_have_some() -> None:
    assert {"README.md", "docs/reference/format.md"} <= set(pages())
