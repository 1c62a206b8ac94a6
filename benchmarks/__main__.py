"""The command: `python -m benchmarks [--workload NAME ...] [--peer NAME ...] [--smoke]`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import machine, report, scenarios
from benchmarks.peers import PEERS
from benchmarks.results import Results

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures checkpoint libraries side by side and writes JSON and Markdown."""
    chosen = _parse(arguments)
    # Restores go to host memory unless the caller's environment names another platform.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    peers = _available(chosen.peer)
    if not peers:
        raise SystemExit("no peer is installed: nothing to measure")
    with tempfile.TemporaryDirectory(prefix="bench-", dir=chosen.dir or default_dir()) as place:
        facts = scenarios.in_new_process(machine.facts, Path(place))
        if facts["file_system"] == "tmpfs":
            sys.stderr.write("warning: tmpfs has no disk behind it; fsync costs nothing there\n")
        done = scenarios.run_all(
            chosen.workload,
            peers=peers,
            rounds=chosen.rounds,
            smoke=chosen.smoke,
            directory=Path(place),
        )
    run = Results(chosen.smoke, datetime.now(UTC).date().isoformat(), facts, done)
    tables = report.markdown(run)
    sys.stdout.write(tables)
    if chosen.out is not None:
        chosen.out.mkdir(parents=True, exist_ok=True)
        run.write(chosen.out / "results.json")
        (chosen.out / "results.md").write_text(tables, encoding="utf-8")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=main.__doc__)
    add = parser.add_argument
    add("--workload", nargs="+", choices=scenarios.NAMES, help="default: all")
    add("--peer", nargs="+", choices=list(PEERS), help="default: all that are installed")
    add("--rounds", type=int, help="rounds after the first one; default: 7, or 2 with --smoke")
    add("--out", type=Path, help="folder for results.json and results.md; default: "
        f"{report.RESULTS.parent}, or nothing is written with --smoke")  # fmt: skip
    add("--dir", type=Path, help="write checkpoints inside a temporary folder here; default: "
        "the disk of the working directory")  # fmt: skip
    add("--smoke", action="store_true", help="tiny sizes: shows that it runs, measures nothing")
    chosen = parser.parse_args(arguments)
    chosen.workload = chosen.workload or list(scenarios.NAMES)
    chosen.peer = chosen.peer or list(PEERS)
    chosen.rounds = chosen.rounds or (2 if chosen.smoke else 7)
    if chosen.out is None and not chosen.smoke:
        chosen.out = report.RESULTS.parent
    return chosen


def default_dir() -> Path:
    """Returns the system's temporary folder if it is on this disk, else the working directory."""
    temporary, here = Path(tempfile.gettempdir()), Path.cwd()
    return temporary if temporary.stat().st_dev == here.stat().st_dev else here


def _available(names: Sequence[str]) -> list[str]:
    available = []
    for name in names:
        missing = PEERS[name].missing()
        if missing is None:
            available.append(name)
        else:
            sys.stderr.write(f"{name}: left out, {missing} is not installed\n")
    return available


if __name__ == "__main__":
    main()
