"""Trials of an object store: its conditional writes and its latency."""

from __future__ import annotations

import contextlib
import statistics
import time
import uuid
from collections.abc import AsyncIterator

import anyio

from ckpt._inspection.machine.findings import Finding
from ckpt._redaction import redact
from ckpt.errors import CheckpointError
from ckpt.storage._base import Storage

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
        yield _latency("write", await _timed_writes(storage, name))
        yield _latency("read", await _timed_reads(storage, name))
    except CheckpointError as error:
        yield Finding("store", "latency", "problem", redact(str(error)), "see the text")
    finally:
        # Shielded, so that it also runs after Ctrl-C, which cancels this task.
        with anyio.CancelScope(shield=True), contextlib.suppress(CheckpointError):
            await storage.drop_note(name)


async def _timed_writes(storage: Storage, name: str) -> list[float]:
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        await storage.put_note(name, b"trial", replace=True)
        times.append(time.perf_counter() - began)
    return times


async def _timed_reads(storage: Storage, name: str) -> list[float]:
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        await storage.read("", name, 1 << 10)
        times.append(time.perf_counter() - began)
    return times


def _latency(what: str, times: list[float]) -> Finding:
    median = statistics.median(times)
    found = f"{median * 1e3:.3g} ms, the slowest of {_ROUNDS} {max(times) * 1e3:.3g} ms"
    if median < _SLOW_SECONDS:
        return Finding("store", f"{what} latency", "ok", found, value=median)
    advice = "use a bucket in the region of the machine; a commit sends several requests in turn"
    return Finding("store", f"{what} latency", "warning", found, advice, median)
