"""What users can see of the library, read from the code: names, calls, commands, files."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

import ckpt
from ckpt.cli import commands
from ckpt.observers import _names
from tests.support.paths import ROOT

__all__ = ["LEDGER", "Feature", "features", "read_ledger", "write_ledger"]

LEDGER = Path(__file__).with_name("ledger.csv")
FORMAT = ROOT / "docs" / "reference" / "format.md"
# The plain calls have the members and parameters of the asyncio ones; tests/unit/test_surfaces.py.
PLAIN = re.compile(r"ckpt\.sync\.|ckpt\.types\.Sync")


class Feature(NamedTuple):
    """One thing that users can see.

    Attributes:
        kind: `name`, `error`, `member`, `parameter`, `command`, `option`, `event`, `metric` or
            `file`.
        name: The name users know it by, such as `ckpt.save(like)` or `ckpt ls --json`.
        owner: The object that has it, if it is a part of a Python object.
        attribute: Its name there.
        call: The call that has it, if it is a parameter that the call requires: each test of the
            call is one of it.
    """

    kind: str
    name: str
    owner: Any = None
    attribute: str = ""
    call: str = ""


def features() -> Iterator[Feature]:
    """Yield everything that users can see, in the order of the ledger."""
    yield from sorted({each.name: each for each in _python()}.values(), key=lambda it: it.name)
    yield from _command()
    yield from _observed()
    yield from _files()


def read_ledger() -> dict[tuple[str, str], str]:
    """Return the test of each row by kind and name; empty if none was seen to fail without it."""
    with LEDGER.open(encoding="utf-8", newline="") as file:
        return {(row["kind"], row["name"]): row["test"] for row in csv.DictReader(file)}


def write_ledger(rows: Mapping[tuple[str, str], str]) -> None:
    """Write the table."""
    with LEDGER.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("kind", "name", "test"))
        writer.writerows((*row, test) for row, test in rows.items())


def _python() -> Iterator[Feature]:
    described: set[int] = set()
    modules = ["ckpt", *(f"ckpt.{name}" for name in dir(ckpt) if _is_module(name)), *_TESTING]
    for path in modules:
        module = importlib.import_module(path)
        yield Feature("name", path, *_home(path))
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            public = f"{path}.{name}"
            is_error = inspect.isclass(value) and issubclass(value, BaseException)
            yield Feature("error" if is_error else "name", public, module, name)
            if not PLAIN.match(public) and id(value) not in described:
                described.add(id(value))
                yield from _parts(public, value, module, name)


_TESTING = (
    *("ckpt.testing.compare", "ckpt.testing.conformance"),
    *("ckpt.testing.coordination", "ckpt.testing.drill", "ckpt.testing.strategies"),
)


def _is_module(name: str) -> bool:
    return inspect.ismodule(getattr(ckpt, name))


def _home(path: str) -> tuple[Any, str]:
    parent, _, name = path.rpartition(".")
    return (importlib.import_module(parent), name) if parent else (None, "")


def _parts(public: str, value: Any, module: Any, name: str) -> Iterator[Feature]:
    if inspect.isclass(value):
        yield from _members(public, value)
    elif inspect.isroutine(value):
        yield from _parameters(public, value, module, name)


def _members(public: str, cls: type) -> Iterator[Feature]:
    fields = set(getattr(cls, "__struct_fields__", ()))
    if dataclasses.is_dataclass(cls):
        fields |= {each.name for each in dataclasses.fields(cls)}
    found = fields | {name for name in vars(cls) if not name.startswith("_")}
    for base in cls.__mro__[1:]:
        # A private base class is a part of each class that users see.
        if base.__module__.startswith("ckpt.") and not _is_public(base):
            found |= {name for name in vars(base) if not name.startswith("_")}
    for name in sorted(each for each in found if not each.startswith("_")):
        yield Feature("member", f"{public}.{name}", cls, name)
        value = inspect.getattr_static(cls, name, None)
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if inspect.isfunction(value):
            yield from _parameters(f"{public}.{name}", value, cls, name)
    made = inspect.getattr_static(cls, "__init__")
    if inspect.isfunction(made) and not dataclasses.is_dataclass(cls) and not _is_error(cls):
        yield from _parameters(public, made, cls, "__init__")


def _is_error(cls: type) -> bool:
    return issubclass(cls, BaseException) and cls is not ckpt.CheckpointError


def _is_public(cls: type) -> bool:
    return any(
        cls in vars(importlib.import_module(f"ckpt.{name}")).values()
        for name in ("errors", "keep", "save_when", "handlers", "storage", "coordination", "types")
    )


def _parameters(public: str, function: Any, owner: Any, name: str) -> Iterator[Feature]:
    for each in inspect.signature(function).parameters.values():
        # A protocol takes anything, and makes nothing of it.
        is_open = getattr(owner, "_is_protocol", False) and each.name in ("args", "kwargs")
        if each.name not in ("self", "cls") and not each.name.startswith("_") and not is_open:
            is_required = each.default is each.empty and each.kind.name.startswith("POSITIONAL_OR")
            call = public if is_required else ""
            yield Feature("parameter", f"{public}({each.name})", owner, name, call)


def _command() -> Iterator[Feature]:
    for name in sorted(commands.NAMES):
        command = commands.load(name)
        yield Feature("command", f"ckpt {name}")
        for each in command.params:
            if isinstance(each, click.Option):
                yield Feature("option", f"ckpt {name} {each.opts[-1]}", command, each.name or "")


def _observed() -> Iterator[Feature]:
    for operation, phases in _names.PHASES.items():
        for phase in (*phases, "end"):
            yield Feature("event", f"{operation} {phase}")
    for table, prefix in (
        (_names.JAX, "jax "),
        (_names.PROMETHEUS, "prometheus "),
        (_names.OPENTELEMETRY, "opentelemetry "),
    ):
        for name in table:
            yield Feature("metric", prefix + name, table, name)


def _files() -> Iterator[Feature]:
    tree = FORMAT.read_text(encoding="utf-8").partition("## Directory tree")[2]
    tree = tree.partition("## The commit rule")[0]
    seen = set()
    for line in re.findall(r"^(<root>/\S+(?: \S+)*?)  ", tree, re.MULTILINE):
        seen.add(line)
    seen |= set(re.findall(r"^\| (?:attempt|trash|lease|probe) \| `([^`]+)`", tree, re.MULTILINE))
    for name in sorted(seen):
        yield Feature("file", name)
