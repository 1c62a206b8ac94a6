"""Trials: does a test fail when a thing that users can see is taken away?"""

from __future__ import annotations

import argparse
import ast
import contextlib
import itertools
import os
import re
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest
from _pytest.runner import runtestprotocol

from tests.ledger.absence import can_take_away, take_away
from tests.ledger.surface import Feature, features, read_ledger, write_ledger
from tests.support.paths import ROOT

__all__ = ["main"]

_PYTEST = (
    *("-p", "no:xdist", "-p", "no:cacheprovider"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
)
SECONDS = 60
# So many tests are tried for a row.
MOST_TRIALS = 4
# So many cases of a test with parameters.
MOST_CASES = 8
_FAILED = 1
FOLDERS = ("unit", "behaviour", "cli", "interop", "hostile", "stores", "multiprocess", "crash")


class Trial(NamedTuple):
    """A test that may fail without a feature."""

    feature: Feature
    test: str


class Candidates:
    """Finds tests that may fail without a feature."""

    def __init__(self) -> None:
        self._words = {
            f"{path.relative_to(ROOT)}::{name}": (own, everything)
            for path in sorted((ROOT / "tests").rglob("test_*.py"))
            for functions, everything in [_parsed(path)]
            for name, own in functions.items()
            if name.startswith("test_")
        }

    def __contains__(self, test: str) -> bool:
        return test in self._words

    def of(self, feature: Feature) -> Iterator[str]:
        """Yield the tests that use the words of a feature, the likeliest and quickest first."""
        wanted = _wanted(feature)
        places = _PLACES.get(feature.kind, ("tests/",))
        found = []
        for test, (own, everything) in self._words.items():
            in_own = len(wanted & own)
            if in_own and wanted <= everything and test.startswith(places):
                folder = test.split("/")[1]
                rank = FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)
                found.append((not wanted <= own, rank, -in_own, len(own), test))
        for *_, test in sorted(found):
            yield test


def try_all(trials: Sequence[Trial]) -> Iterator[Trial]:
    """Yield the trials whose test fails without the feature, and passes with it."""
    by_file: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        by_file[trial.test.partition("::")[0]].append(trial)
    for file, own in by_file.items():
        yield from _try_file(file, own)


def _try_file(file: str, trials: list[Trial]) -> list[Trial]:
    """Make the trials of one file of tests in a fork of this process."""
    assert _threads() == 1, "a process with threads cannot be forked"
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        os.dup2(1, 2)
        pytest.main(["-q", *_PYTEST, str(ROOT / file)], [_Session(trials, writer)])
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as results:
        found = results.read()
    os.waitpid(pid, 0)
    # Much is made when tests are imported, such as their cases: it must be gone before that.
    ended = found.ljust(len(trials), b"\0")
    return [
        trial
        for trial, failed in zip(trials, ended, strict=True)
        if failed or _fails_from_the_start(trial)
    ]


def _fails_from_the_start(trial: Trial) -> bool:
    return _ends(trial.test, trial.feature) == _FAILED and _ends(trial.test, None) == 0


def _ends(test: str, gone: Feature | None) -> int:
    """Run a test in a fork, without a feature from the start; return the status of pytest."""
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        os.dup2(1, 2)
        if gone is not None:
            take_away(gone)
        status = int(pytest.main(["-q", "-x", *_PYTEST, str(ROOT / test)]))
        # A file of tests that cannot be imported fails, too.
        unimported = (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.USAGE_ERROR)
        os._exit(_FAILED if status in unimported else status)
    return _status_of(pid)


def _status_of(pid: int) -> int:
    """Wait for a fork, and end what it leaves behind; return its status, or -1 after a while."""
    until = time.monotonic() + SECONDS
    ended = status = 0
    while not ended and time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if not ended:
        os.waitpid(pid, 0)
        return -1
    return os.waitstatus_to_exitcode(status)


class _Session:
    """The plugin that makes trials in place of running the tests; writes a byte for each."""

    def __init__(self, trials: list[Trial], results: int) -> None:
        self._trials = trials
        self._results = results
        self._passes: dict[str, bool] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if _threads() > 1:
            # Importing the tests has started the devices of jax.
            return True
        for feature, test in self._trials:
            items = [each for each in session.items if each.nodeid.partition("[")[0] == test]
            items = items[:MOST_CASES]
            failed = self._fails(items, feature) or self._fails(items, feature, wholly=True)
            if failed and test not in self._passes:
                self._passes[test] = not self._fails(items, None)
            os.write(self._results, bytes([failed and self._passes[test]]))
        return True

    def _fails(
        self, items: list[pytest.Item], gone: Feature | None, *, wholly: bool = False
    ) -> bool:
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            # Programs that the test leaves behind must not hold it open.
            os.close(self._results)
            _run(items, gone, wholly)
        status = _status_of(pid)
        return status == _FAILED or (gone is None and status != 0)


def _run(items: list[pytest.Item], gone: Feature | None, wholly: bool) -> NoReturn:
    """Run tests until one fails, in a process of their own."""
    status = 0
    try:
        if gone is not None:
            take_away(gone, wholly=wholly)
        for item in items:
            reports = runtestprotocol(item, log=False, nextitem=None)
            if any(report.failed for report in reports):
                status = _FAILED
                break
    finally:
        os._exit(status)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


_PLACES = {
    "command": ("tests/cli/",),
    "option": ("tests/cli/",),
    "metric": ("tests/unit/observers/", "tests/behaviour/"),
    "event": ("tests/unit/observers/", "tests/behaviour/"),
}


def _wanted(feature: Feature) -> set[str]:
    """The words that a test of a feature has."""
    name = feature.name
    match feature.kind:
        case "parameter":
            call, _, parameter = name.rstrip(")").partition("(")
            return {parameter, call.rpartition(".")[2]}
        case "member":
            cls, _, member = name.rpartition(".")
            short = cls.rpartition(".")[2]
            return {member} if short in _UNNAMED else {member, short}
        case "command" | "option":
            return set(name.split()[1:])
        case "event":
            return set(name.split())
        case "metric":
            return set(re.split(r"[/. ]", name)[-2:])
        case "file":
            return set(re.findall(r"[A-Za-z_]{4,}", re.sub(r"<[^>]*>", " ", name)))
        case "error":
            return {name.rpartition(".")[2], "raises"}
    return {word for word in name.split(".")[-2:] if word != "ckpt"}


# Classes that tests seldom name: calls return them, or helpers make them.
_UNNAMED = {
    *("CheckpointManager", "Commit", "Event", "ItemInfo", "LeafInfo", "PartialSave", "Pin"),
    *("Problem", "SaveStatistics", "SavedStep", "StepInfo", "StepMetadata", "StoredArray"),
    *("Summary", "Trash", "TrashedStep", "VerifyReport", "Watch"),
}


def _parsed(path: Path) -> tuple[dict[str, set[str]], set[str]]:
    """The words of each function of a module, and those of all of it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = {
        node.name: set(_words_of(node))
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    return functions, set(_words_of(tree))


def _words_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=word) | ast.Name(id=word) | ast.keyword(arg=str(word)):
                yield word
            case ast.Constant(value=str(text)):
                yield from re.findall(r"--[a-z][a-z-]*|\w+", text)
            case ast.alias(name=word):
                yield word


def main(arguments: Sequence[str]) -> int:
    """Make the trials; return 1 if the test of a row does not fail."""
    parser = argparse.ArgumentParser(prog="python -m tests.ledger", description=__doc__)
    parser.add_argument("--write", action="store_true", help="look for other tests, and write them")
    parser.add_argument("--only", default="", metavar="PATTERN", help="rows whose name matches")
    parser.add_argument("--missing", action="store_true", help="only rows that were not shown")
    options = parser.parse_args(arguments)
    candidates = Candidates()
    every = {(each.kind, each.name): each for each in features()}
    rows = {row: test for row, test in read_ledger().items() if test in candidates}
    # The tests of what cannot be taken away are chosen by a reader.
    left = {
        row: feature
        for row, feature in every.items()
        if re.search(options.only, feature.name)
        and can_take_away(feature)
        and not feature.call
        and not (options.missing and row in rows)
    }
    tests = {row: iter([rows[row]] if row in rows else []) for row in left}
    if options.write:
        tests = {
            row: itertools.chain(found, itertools.islice(candidates.of(left[row]), MOST_TRIALS))
            for row, found in tests.items()
        }
    while trials := [Trial(left[row], test) for row in left if (test := next(tests[row], ""))]:
        for feature, test in try_all(trials):
            rows[feature.kind, feature.name] = test
            left.pop((feature.kind, feature.name), None)
            if options.write:
                write_ledger(_all_rows(every, rows))
        sys.stdout.write(f"{len(trials)} trials made, {len(left)} rows left\n")
        sys.stdout.flush()
    if options.write:
        write_ledger(_all_rows(every, rows))
    for kind, name in left:
        sys.stdout.write(f"no test fails without {kind} {name}\n")
    return bool(left)


def _all_rows(
    every: Mapping[tuple[str, str], Feature], rows: Mapping[tuple[str, str], str]
) -> dict[tuple[str, str], str]:
    """Return the whole table; the tests of a call are those of the parameters that it requires."""
    return {
        row: rows.get(("name", feature.call))
        or rows.get(("member", feature.call))
        or rows.get(row, "")
        for row, feature in every.items()
    }
