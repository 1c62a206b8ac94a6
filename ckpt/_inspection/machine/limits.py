"""Limits of the machine, its container and its user: processors, memory, open files."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from ckpt._inspection.machine.findings import Finding, Verdict
from ckpt._tree.table import format_bytes

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
