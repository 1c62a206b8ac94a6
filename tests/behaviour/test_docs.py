"""Every python block of the README and of the documentation runs."""

from __future__ import annotations

import doctest
import itertools
import re
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


@pytest.mark.parametrize("page", [each for each in pages() if "/tutorials/" in each])
def test_tutorials_print_what_they_show(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A `text` block is the output of the block before it; `...` stands for anything."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"^```(\w+)\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S
    )
    namespace: dict[str, object] = {"__name__": "__main__"}
    shown = 0
    for (language, code), (following, expected) in itertools.pairwise([*blocks, ("", "")]):
        if language != "python":
            continue
        exec(compile(code, page, "exec", dont_inherit=True), namespace)
        printed = capsys.readouterr().out
        if following == "text":
            matches = doctest.OutputChecker().check_output(expected, printed, doctest.ELLIPSIS)
            assert matches, f"expected:\n{expected}\nprinted:\n{printed}"
            shown += 1
        else:
            assert not printed, f"not shown on the page:\n{printed}"
    assert shown


def test_the_pages_that_promise_examples_have_some() -> None:
    assert {"README.md", "docs/reference/format.md"} <= set(pages())
