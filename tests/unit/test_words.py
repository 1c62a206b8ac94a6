"""One word for each idea: class names are unique, modules are nouns, the glossary stays short."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from tests.support.paths import ROOT

PACKAGE = ROOT / "ckpt"
GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"
# The same class twice, on purpose: the plain face of a manager has the name of the other.
TWINS = {
    "CheckpointManager": ["ckpt/_api/manager.py", "ckpt/_api/plain/manager.py"],
    "ManagedSteps": ["ckpt/_api/managed_steps.py", "ckpt/_api/plain/managed_steps.py"],
    # Policies have the same names in `save_when` and `keep`, and are always written with them.
    "Any": ["ckpt/keep/_keep_policies.py", "ckpt/save_when/_save_policies.py"],
    "EverySeconds": ["ckpt/keep/_keep_policies.py", "ckpt/save_when/_save_policies.py"],
    "EverySteps": ["ckpt/keep/_keep_policies.py", "ckpt/save_when/_save_policies.py"],
    "Steps": ["ckpt/keep/_keep_policies.py", "ckpt/save_when/_save_policies.py"],
}
# Nouns that end like a gerund, and the names of other libraries' modules.
NOT_GERUNDS = {
    "chunking",
    "encoding",
    "jax_monitoring",
    "listing",
    "nonfinite_warning",
    "ranking",
    "staging",
    "testing",
}
# Words of all pages. The number may fall.
MOST_WORDS = 60_000
_WRITTEN_BY_SCRIPTS = re.compile(r"<!-- ([\w:-]+):start -->.*?<!-- \1:end -->", re.DOTALL)
GREATEST_GLOSSARY = 40


def test_a_class_name_means_one_class() -> None:
    found = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(path.relative_to(ROOT).as_posix())
    twice = {name: places for name, places in found.items() if len(places) > 1}
    assert twice == TWINS


def test_modules_are_called_by_nouns() -> None:
    stems = {path.stem.lstrip("_") for path in PACKAGE.rglob("*.py")}
    assert {stem for stem in stems if stem.endswith("ing")} <= NOT_GERUNDS


def test_the_glossary_is_short_and_in_order() -> None:
    rows = [line for line in GLOSSARY.read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    words = [row.split("|")[1].strip() for row in rows[1:]]
    assert len(words) <= GREATEST_GLOSSARY
    assert words == sorted(words, key=str.lower)


def test_the_pages_have_no_more_words_than_they_may() -> None:
    """Tables that a script writes are not counted; nor is what the next version brings."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    pages += [ROOT / "SECURITY.md", ROOT / "benchmarks/README.md", *(ROOT / "docs").rglob("*.md")]
    words = [len(_WRITTEN_BY_SCRIPTS.sub("", page.read_text("utf-8")).split()) for page in pages]
    assert sum(words) <= MOST_WORDS
