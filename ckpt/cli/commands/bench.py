"""`ckpt bench`: speed of saves and restores, compared with the raw disk."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from msgspec import Struct

from ckpt._inspection.disk import (
    RawFile,
    direct_io,
    drop_from_cache,
    file_system_of,
    scratch_folder,
)
from ckpt._inspection.machine import memory_limit
from ckpt._tree.table import format_bytes
from ckpt.cli import options
from ckpt.cli.output import ByteSize, count_text, printable, rate_text, seconds_text, show, table
from ckpt.cli.progress import LiveLine
from ckpt.errors import CheckpointError, InvalidArgumentError, StorageError
from ckpt.storage._resolve import local_path

_PAGES = 1 << 16
# In memory: the state, its copy in the memory for staging, and the bytes of the raw file.
_COPIES_IN_MEMORY = 4
_COPIES_ON_DISK = 3


class Measured(Struct, frozen=True):
    """One figure over the rounds.

    Attributes:
        name: Name of the measured work.
        seconds: Median of the rounds.
        least_seconds: The shortest of the rounds.
        most_seconds: The longest of the rounds.
        rate: Bytes per second, by the median; None if no bytes are moved.
        of_raw: The rate over that of the raw file; None for the raw file itself.
    """

    name: str
    seconds: float
    least_seconds: float
    most_seconds: float
    rate: float | None
    of_raw: float | None


class BenchReport(Struct, frozen=True):
    """The speed of a place.

    Attributes:
        path: The directory.
        file_system: Kind of its file system.
        direct: True if files are written past the page cache there.
        nbytes: Bytes of the state.
        rounds: Number of measured rounds; one more round precedes them.
        measured: The figures.
    """

    path: str
    file_system: str
    direct: bool
    nbytes: int
    rounds: int
    measured: list[Measured]


@click.command()
@click.argument("path", type=options.PATH, default=".")
@click.option("--size", type=ByteSize(), default="1GiB", help="Bytes of the state [1GiB].")
@click.option("--rounds", type=click.IntRange(1, 100), default=3, help="How many rounds [3].")
@options.as_json
def bench(path: str, size: int, rounds: int, as_json: bool) -> None:
    """Measure saves and restores next to the raw disk.

    The raw disk is one file, written and read in the same directory. Everything takes turns,
    and the medians are shown. The files that it makes are removed.
    """
    directory = local_path(path)
    if directory is None:
        raise InvalidArgumentError(f"{path}: only a directory can be measured, not a store")
    if not os.path.isdir(directory):
        raise InvalidArgumentError(f"{path}: there is no such directory")
    nbytes = max(size // _PAGES, 1) * _PAGES
    _check_room(directory, nbytes)
    try:
        with scratch_folder(directory) as folder, LiveLine() as line:
            found = _measured(folder, directory, nbytes, rounds, None if as_json else line)
    except OSError as error:
        raise StorageError(
            f"cannot use {directory}: {error.strerror or error}", errno=error.errno
        ) from error
    show(found, _view, as_json=as_json)


def _check_room(directory: Path, nbytes: int) -> None:
    state = os.statvfs(directory)
    free = state.f_bavail * state.f_frsize
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = min(total, memory_limit() or total)
    for has, needed, what in (
        (free, _COPIES_ON_DISK * nbytes, f"{directory} has {format_bytes(free)} free"),
        (memory, _COPIES_IN_MEMORY * nbytes, f"this machine has {format_bytes(memory)} of memory"),
    ):
        if has < needed:
            raise InvalidArgumentError(
                f"{what}, and {format_bytes(needed)} are needed. Give a smaller --size"
            )


def _measured(
    folder: Path, directory: Path, nbytes: int, rounds: int, line: LiveLine | None
) -> BenchReport:
    times: dict[str, list[float]] = {}
    direct = direct_io(folder).verdict == "ok"
    root, files = folder / "runs", folder / "files"
    files.mkdir()
    raw = RawFile(files, nbytes)
    with _worker("save", root, nbytes) as saver:
        # The first round includes one-time costs, and is not counted.
        for turn in range(rounds + 1):
            if line is not None:
                line.show(f"round {turn} of {rounds}" if turn else "warming up")
            step = turn + 1
            found = {"raw write": raw.write(), "raw read": raw.read()}
            raw.remove()
            os.sync()
            found |= saver.do(step)
            with _worker("restore", root, nbytes) as restorer:
                drop_from_cache(root)
                found |= restorer.do(step)
            saver.do(-step)
            for name, seconds in found.items():
                times.setdefault(name, []).append(seconds)
    counted = {name: seconds[1:] for name, seconds in times.items()}
    limits = {
        name: nbytes / statistics.median(counted[raw_name])
        for name, raw_name in (("save", "raw write"), ("restore", "raw read"))
    }
    order = ("raw write", "save", "blocked", "raw read", "restore")
    measured = [_figure(name, counted[name], nbytes, limits.get(name)) for name in order]
    kind = file_system_of(directory)
    return BenchReport(str(directory), kind, direct, nbytes, rounds, measured)


def _figure(name: str, seconds: list[float], nbytes: int, limit: float | None) -> Measured:
    median = statistics.median(seconds)
    rate = None if name == "blocked" else nbytes / median
    of_raw = rate / limit if rate is not None and limit is not None else None
    return Measured(name, median, min(seconds), max(seconds), rate, of_raw)


class _Worker:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def do(self, step: int) -> dict[str, float]:
        """Have the process work on a step; return the times that it took."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{step}\n")
            self._process.stdin.flush()
        # The answer is empty if the system has killed the process.
        found: dict[str, Any] = json.loads(self._process.stdout.readline() or "{}")
        if step > 0 and "save" not in found and "restore" not in found:
            what = found.get("error") or "it was killed, or ended without a word"
            raise CheckpointError(f"the process that was measured has failed: {what}")
        return found


@contextlib.contextmanager
def _worker(what: str, root: Path, nbytes: int) -> Iterator[_Worker]:
    process = subprocess.Popen(
        [sys.executable, "-m", "ckpt.cli.bench_worker", what, str(root), str(nbytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # The worker answers with its errors. Its warnings are about drivers and devices.
        stderr=subprocess.DEVNULL,
        text=True,
        # Ctrl-C goes to this process, which ends the worker.
        process_group=0,
    )
    try:
        yield _Worker(process)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _view(found: BenchReport) -> Iterator[str]:
    rows = [
        (
            each.name,
            seconds_text(each.seconds),
            f"{seconds_text(each.least_seconds)} to {seconds_text(each.most_seconds)}",
            "" if each.rate is None else rate_text(each.rate),
            "" if each.of_raw is None else f"{each.of_raw:.0%}",
        )
        for each in found.measured
    ]
    headers = ("", "median", "least to most", "rate", "of raw")
    yield from table(headers, rows, right=headers[1:])
    how = "past the page cache" if found.direct else "through the page cache"
    yield click.style(
        f"{printable(found.path)} ({printable(found.file_system)}, {how}): "
        f"{format_bytes(found.nbytes)}, {count_text(found.rounds, 'round')}",
        dim=True,
    )
