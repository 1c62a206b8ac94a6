"""Watches the memory of a process from another one, which the work under test cannot hold up.

`python -m benchmarks.sampler PID` reads lines: `start` begins a watch, `stop` ends it and is
answered by one line of JSON, the peak of each figure in bytes. `Sampler` is the other end.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Self

_EVERY_SECONDS = 0.002
# The kernel's names of what the process alone holds. The rest of the total are mapped files, page
# cache that the system may take back.
_OWN = ("RssAnon", "RssShmem")
_TOTAL = "VmRSS"


def is_supported() -> bool:
    """Tells whether this system says how much memory of a process is resident, and of what kind."""
    return _OWN[0] in _status(os.getpid())


def resident(pid: int) -> dict[str, int]:
    """Returns the resident bytes of a process: `own`, and `total` with mapped files."""
    found = {"own": 0, "total": 0}
    for line in _status(pid).splitlines():
        name, _, value = line.partition(":")
        if name in (*_OWN, _TOTAL):
            found["total" if name == _TOTAL else "own"] += int(value.split()[0]) * 1024
    return found


def _status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return ""


class Sampler:
    """A second process that watches this one."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.sampler", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._ask("start")
        self._ask("stop")  # it is up
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def start(self) -> None:
        """Begins a watch."""
        self._ask("start")

    def stop(self) -> dict[str, int]:
        """Ends the watch; returns the peak of each kind, and how many `samples` were taken."""
        peaks: dict[str, int] = self._ask("stop")
        return peaks

    def _ask(self, word: str) -> dict[str, int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        answer: dict[str, int] = json.loads(self._process.stdout.readline())
        return answer


def _watch(pid: int) -> dict[str, int]:
    """Samples until there is something to read; returns the peaks."""
    peaks = {"own": 0, "total": 0}
    samples = 0
    while not select.select([sys.stdin], [], [], _EVERY_SECONDS)[0]:
        for kind, value in resident(pid).items():
            peaks[kind] = max(peaks[kind], value)
        samples += 1
    return peaks | {"samples": samples}


def main() -> None:
    """Answers `start` and `stop` until the other end goes away."""
    pid = int(sys.argv[1])
    peaks: dict[str, int] = {}
    while line := sys.stdin.readline():
        if line.strip() == "start":
            sys.stdout.write("{}\n")
            sys.stdout.flush()
            peaks = _watch(pid)
        else:
            sys.stdout.write(json.dumps(peaks) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
