"""The machine of a run: its limits, libraries and stores, as findings with advice."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import statistics
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal

import anyio
from msgspec import Struct

from ckpt._redaction import redact
from ckpt._tree.table import format_bytes
from ckpt.errors import CheckpointError
from ckpt.storage._base import Storage

Verdict = Literal["ok", "warning", "problem"]


class Finding(Struct, frozen=True):
    """The result of one check.

    Attributes:
        group: The checked area: `software`, `machine`, `disk` or `store`.
        name: Name of the check.
        verdict: `ok`, `warning` (slower, or less safe, than it could be) or `problem` (saves fail,
            or could be lost).
        found: The observation, as text.
        advice: The recommended change; empty if there is nothing to change.
        value: The measured figure, if there is one: bytes, seconds or a number.
    """

    group: str
    name: str
    verdict: Verdict
    found: str
    advice: str = ""
    value: float | None = None


class Diagnosis(Struct, frozen=True):
    """All findings.

    Attributes:
        path: The place that was checked, or None.
        findings: The findings, in the order of the checks.
        warnings: Number of warnings.
        problems: Number of problems.
    """

    path: str | None
    findings: list[Finding]
    warnings: int
    problems: int


def diagnosis(path: str | None, findings: list[Finding]) -> Diagnosis:
    """Return a diagnosis with the numbers of warnings and problems."""
    verdicts = [each.verdict for each in findings]
    return Diagnosis(path, findings, verdicts.count("warning"), verdicts.count("problem"))


_SHARED = Path("/dev/shm")
_LEAST_MEMORY = 2 << 30
_LEAST_SHARED = 64 << 20
_LEAST_FILES = 1024


def limits() -> Iterator[Finding]:
    """Yield a finding for each limit."""
    yield _processors()
    yield _memory()
    yield _address_space()
    yield _locked_memory()
    yield _open_files()
    if _SHARED.is_dir():
        yield _shared_memory()


def _processors() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    count = float(usable or 1)
    quota = processor_quota()
    found = f"{count:.0f}"
    if quota is not None and quota < count:
        found, count = f"{quota:.3g} of {count:.0f}, by the limit of the container", quota
    if count < 2:
        advice = "saves take processor time from training; give the job two or more"
        return Finding("machine", "processors", "warning", found, advice, count)
    return Finding("machine", "processors", "ok", found, value=count)


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit()
    found = format_bytes(total)
    if limit is not None and limit < total:
        found, total = f"{format_bytes(limit)}, by the limit of the container", limit
    # A quarter is the default of `Staging(budget_bytes)`.
    found += f"; saves may stage {format_bytes(total // 4)} at a time"
    if total < _LEAST_MEMORY:
        advice = "little memory: a save blocks until most of it is written"
        return Finding("machine", "memory", "warning", found, advice, total)
    return Finding("machine", "memory", "ok", found, value=total)


def _address_space() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return Finding("machine", "address space", "ok", "unlimited")
    advice = "ulimit -v unlimited: jax reserves far more address space than it uses"
    return Finding("machine", "address space", "warning", format_bytes(soft), advice, soft)


def _locked_memory() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    # GPU drivers lock memory for staging in a way of their own, which this limit does not affect.
    found = "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)
    return Finding(
        "machine", "locked memory", "ok", found, value=None if found == "unlimited" else soft
    )


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return Finding("machine", "open files", "ok", "unlimited")
    if soft >= _LEAST_FILES:
        return Finding("machine", "open files", "ok", str(soft), value=soft)
    allowed = hard == resource.RLIM_INFINITY or hard >= _LEAST_FILES
    advice = f"ulimit -n {_LEAST_FILES}" + ("" if allowed else ", as an administrator")
    verdict: Verdict = "warning" if soft >= 256 else "problem"
    return Finding("machine", "open files", verdict, str(soft), advice, soft)


def _shared_memory() -> Finding:
    state = os.statvfs(_SHARED)
    size, free = state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize
    found = f"{format_bytes(size)}, {format_bytes(free)} free"
    if size < _LEAST_SHARED:
        # This library uses no shared memory, but others in the job do.
        advice = "data loaders and collectives of one machine may fail: docker run --shm-size=1g"
        return Finding("machine", "/dev/shm", "warning", found, advice, size)
    return Finding("machine", "/dev/shm", "ok", found, value=size)


def memory_limit(top: Path = Path("/sys/fs/cgroup"), own: Path | None = None) -> int | None:
    """Return the memory limit of the container or job in bytes; None without one.

    Args:
        top: Directory of the control groups of the kernel.
        own: The file that names the groups of this process.
    """
    found = []
    for folder in _groups(top, own or Path("/proc/self/cgroup"), "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / name)
            if text.isdecimal():
                found.append(int(text))
    # Version 1 of control groups writes "no limit" as a number near 2**63.
    return min((each for each in found if 0 < each < 1 << 60), default=None)


def processor_quota(top: Path = Path("/sys/fs/cgroup"), own: Path | None = None) -> float | None:
    """Return the number of processors that the container or job may use; None without a limit."""
    found = []
    for folder in _groups(top, own or Path("/proc/self/cgroup"), "cpu"):
        text = _read(folder / "cpu.max").split()
        if not text:
            text = [_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        if len(text) == 2 and all(each.isdecimal() for each in text) and int(text[1]):
            found.append(int(text[0]) / int(text[1]))
    return min(found, default=None)


def _groups(top: Path, own: Path, controller: str) -> Iterator[Path]:
    """Yield the control group of this process and the groups above it; each may have a limit."""
    for line in _read(own).splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names and controller not in names.split(","):
            continue
        base = top if number == "0" and not names else top / controller
        group = base / path.lstrip("/")
        yield group
        yield from (each for each in group.parents if each.is_relative_to(base))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


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


_ROUNDS = 5
_SLOW_SECONDS = 1.0
_FOLDER = ".ckpt-trial"


async def store(storage: Storage) -> AsyncIterator[Finding]:
    """Yield a finding for each trial; the objects of the trials are removed."""
    began = time.perf_counter()
    try:
        # This tries conditional writes whose conditions do not hold.
        await storage.prepare()
    except CheckpointError as error:
        yield Finding("store", "conditional writes", "problem", redact(str(error)), "see the text")
        return
    seconds = time.perf_counter() - began
    yield Finding("store", "conditional writes", "ok", f"heeded, tried in {seconds:.2f} s")
    name = f"{_FOLDER}/{uuid.uuid4().hex}"
    try:
        yield await _latency("write", partial(storage.put_note, name, b"trial", replace=True))
        yield await _latency("read", partial(storage.read, "", name, 1 << 10))
    except CheckpointError as error:
        yield Finding("store", "latency", "problem", redact(str(error)), "see the text")
    finally:
        # Shielded, so that it also runs after Ctrl-C, which cancels this task.
        with anyio.CancelScope(shield=True), contextlib.suppress(CheckpointError):
            await storage.drop_note(name)


async def _latency(what: str, request: Callable[[], Awaitable[object]]) -> Finding:
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        await request()
        times.append(time.perf_counter() - began)
    median = statistics.median(times)
    found = f"{median * 1e3:.3g} ms, the slowest of {_ROUNDS} {max(times) * 1e3:.3g} ms"
    if median < _SLOW_SECONDS:
        return Finding("store", f"{what} latency", "ok", found, value=median)
    advice = "use a bucket in the region of the machine; a commit sends several requests in turn"
    return Finding("store", f"{what} latency", "warning", found, advice, median)
