"""Versions of the libraries that this one runs on, next to the required ones. Imports none."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import metadata

from ckpt._inspection.machine.findings import Finding

_DISTRIBUTION = "ckpt-jax"
_WATCHED = ("jax", "jaxlib", "numpy", "tensorstore")
_LEAST = re.compile(r"^([A-Za-z0-9_.-]+)>=([0-9][0-9.]*)")
_CLASSIFIER = "Programming Language :: Python :: 3."


def software() -> Iterator[Finding]:
    """Yield a finding for Python, this library, and each library that matters for it."""
    try:
        own = metadata.metadata(_DISTRIBUTION)
        needed = metadata.requires(_DISTRIBUTION) or []
        yield _ok("ckpt", own["Version"])
        classifiers = own.get_all("Classifier") or []
    except metadata.PackageNotFoundError:
        needed, classifiers = [], []
        advice = "install it (pip install ckpt-jax), so that its versions are checked"
        yield Finding("software", "ckpt", "warning", "used from its sources", advice)
    yield _python(classifiers)
    least = {m[1].lower(): m[2] for each in needed if (m := _LEAST.match(each))}
    # jaxlib has no entry: jax requires the version that it needs.
    for name in _WATCHED:
        yield _library(name, least.get(name))


def _python(classifiers: list[str]) -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    tested = sorted(
        int(each[len(_CLASSIFIER) :])
        for each in classifiers
        if each.startswith(_CLASSIFIER) and each[len(_CLASSIFIER) :].isdecimal()
    )
    if tested and sys.version_info.minor not in tested:
        shown = f"3.{tested[0]} to 3.{tested[-1]}"
        return Finding("software", "python", "warning", version, f"tested are {shown}")
    return _ok("python", version)


def _library(name: str, least: str | None) -> Finding:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        advice = f"python -m pip install '{name}>={least}'" if least else f"pip install {name}"
        return Finding("software", name, "problem", "not installed", advice)
    if least is not None and numbers(version) < numbers(least):
        advice = f"python -m pip install '{name}>={least}': older ones are not tested"
        return Finding("software", name, "problem", version, advice)
    return _ok(name, version)


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release for comparison, such as (0, 10, 2) for `0.10.2.dev5`."""
    found = re.match(r"[0-9]+(\.[0-9]+)*", version)
    parts = [] if found is None else [int(each) for each in found[0].split(".")]
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


def _ok(name: str, found: str) -> Finding:
    return Finding("software", name, "ok", found)
