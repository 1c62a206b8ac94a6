"""The command: `python -m benchmarks [--workload NAME ...] [--peer NAME ...] [--smoke|--quick]`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import pictures, report, scenarios
from benchmarks.peers import PEERS
from benchmarks.rounds import Setting, cpu_devices, default_dir, in_new_process

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures checkpoint libraries side by side and writes JSON, Markdown and charts."""
    chosen = _parse(arguments)
    # Restores go to host memory unless the caller's environment names another platform.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    peers = tuple(_available(chosen.peer))
    if not peers:
        raise SystemExit("no peer is installed: nothing to measure")
    publishes = not (chosen.out or chosen.workload or chosen.peer or chosen.smoke)
    folder = report.RESULTS.parent if publishes else chosen.out
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=chosen.dir) as place,
        cpu_devices(1),
    ):
        run, failed = scenarios.measured(
            {name: scenarios.SCENARIOS[name] for name in chosen.workload or scenarios.SCENARIOS},
            Setting(peers, chosen.rounds or 0, chosen.smoke, Path(place)),
            quick=chosen.quick,
        )
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            # Of the record behind the page, a run that failed somewhere replaces nothing.
            run.write(folder / ("incomplete.json" if publishes and failed else "results.json"))
            try:
                in_new_process(pictures.draw_one_save, folder, Path(place, "save"), chosen.smoke)
            except Exception:
                traceback.print_exc()
                failed.append("picture")
    sys.stdout.write(report.markdown(run))
    if publishes and not failed:
        report.publish(run, report.PAGE)
    elif chosen.out is not None:
        pictures.draw(run, chosen.out)
        (chosen.out / "results.md").write_text(report.markdown(run), encoding="utf-8")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=main.__doc__)
    add = parser.add_argument
    add("--workload", nargs="+", choices=list(scenarios.SCENARIOS), metavar="NAME",
        help=f"of {', '.join(scenarios.SCENARIOS)}; default: all")  # fmt: skip
    add("--peer", nargs="+", choices=list(PEERS), help="default: all that are installed")
    add("--rounds", type=int, help="rounds of every scenario after its first one; default: what "
        "suits the scenario")  # fmt: skip
    add("--out", type=Path, help="folder for results.json, results.md and charts; default: a "
        f"run of everything goes to {report.PAGE} and {report.RESULTS.parent}, another one is "
        "only shown")  # fmt: skip
    add("--dir", type=Path, default=default_dir(), help="write checkpoints inside a temporary "
        "folder here; default: the disk of the working directory")  # fmt: skip
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="real sizes, few rounds: 15 minutes")
    size.add_argument(
        "--smoke", action="store_true", help="tiny sizes: shows that it runs, measures nothing"
    )
    chosen = parser.parse_args(arguments)
    if chosen.rounds is not None and chosen.rounds < 1:
        parser.error("--rounds: at least 1")
    return chosen


def _available(names: Sequence[str] | None) -> Iterator[str]:
    for name in names or PEERS:
        if missing := PEERS[name].missing():
            sys.stderr.write(f"{name}: left out, {missing} is not installed\n")
        else:
            yield name


if __name__ == "__main__":
    main()
