"""The ledger has everything that users can see, and a test for each; see `tests.ledger`."""

from __future__ import annotations

import ast
import csv
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ledger import surface
from tests.support.paths import ROOT

# Rows without a test; nobody raises it.
WITHOUT_TEST = 0


def test_the_ledger_has_everything_that_users_can_see() -> None:
    seen = [(each.kind, each.name) for each in surface.features()]
    rows = list(surface.read_ledger())
    assert sorted(set(seen) - set(rows)) == [], "not in the ledger"
    assert sorted(set(rows) - set(seen)) == [], "in the ledger, and not to be seen"
    assert rows == seen


def test_the_tests_in_it_are_there() -> None:
    for row, test in surface.read_ledger().items():
        file, _, name = test.partition("::")
        assert not test or name in functions_of(ROOT / file), (row, test)


def test_what_was_dropped_is_gone_and_has_a_reason() -> None:
    text = (ROOT / "tests/ledger/dropped.csv").read_text(encoding="utf-8")
    dropped = list(csv.DictReader(text.splitlines()))
    assert not {(row["kind"], row["name"]) for row in dropped} & set(surface.read_ledger())
    assert all(row["reason"] for row in dropped)


def test_rows_without_a_test_only_get_fewer() -> None:
    assert sum(not test for test in surface.read_ledger().values()) <= WITHOUT_TEST


@functools.cache
def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("ckpt.coordination.MemoryKeyValues", "ckpt.errors.HandlerError"),
        *("ckpt.types.SaveStatistics.blocked", "ckpt.load(like)"),
    ],
)
def test_the_test_of_a_row_fails_without_it(name: str) -> None:
    assert next(test for row, test in surface.read_ledger().items() if row[1] == name)
    ended = subprocess.run(
        [sys.executable, "-m", "tests.ledger", "--only", f"^{re.escape(name)}$"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=ROOT,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 trials made, 0 rows left" in ended.stdout
