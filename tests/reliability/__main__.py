"""Runs the campaigns at their full counts and records them: `python -m tests.reliability`.

`--only` takes parts of campaigns' names, `--scale 0.1` makes a tenth of the runs. What is recorded
replaces the earlier record of the same campaign, and the table of docs/explanation/reliability.md
is made anew. The exit status is 1 if anything was lost.
"""

from __future__ import annotations

import tests.conftest  # noqa: F401  (sets what has to be set before jax is imported)

# isort: split

import argparse
import datetime
import importlib
import logging
import platform
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import jax

from tests.reliability import report
from tests.reliability.report import Record
from tests.reliability.tally import Tally
from tests.support.paths import let_programs_import_tests

__all__ = ["CAMPAIGNS", "main"]


@dataclass(frozen=True)
class Campaign:
    """A campaign: what it does, its function, and how often it is run."""

    name: str
    function: str
    count: int


# The counts of faults and crash states are larger than there are: every one is met.
CAMPAIGNS = (
    Campaign("kill -9 at every system call of a save", "kills.at_calls", 200),
    Campaign("kill -9 at a random moment", "kills.at_random", 500),
    Campaign("kill -9 while steps are drained to another disk", "drains.at_random", 200),
    Campaign("kill -9 of a trainer that takes snapshots in memory", "snapshots.at_random", 200),
    Campaign("kill -9 at every system call of snapshots and flushes", "snapshots.at_calls", 200),
    Campaign("SIGTERM in a compile, after a snapshot in memory", "snapshots.in_compiles", 100),
    Campaign("kill -9 of a trainer and its keeper together", "snapshots.with_keepers", 200),
    Campaign("a trainer starts beside a keeper that writes", "snapshots.beside_keepers", 100),
    Campaign("kill -9 of a job that takes snapshots, and a host is lost", "peers.at_random", 100),
    Campaign("kill -9 of a whole job that takes snapshots", "job_ends.at_random", 100),
    Campaign("kill -9 of keepers that join the parts of a step", "joins.at_random", 200),
    Campaign("power cut (ext4)", "power.cuts", 60),
    Campaign(
        "states a power cut may leave, by the record of one save", "crash_states.power_cuts", 3000
    ),
    Campaign("the process dies at every file operation", "faults.crashes", 10_000),
    Campaign("every file operation fails once", "faults.transient_errors", 10_000),
    Campaign("every file operation fails from then on", "faults.persistent_errors", 10_000),
    Campaign("short writes", "io_errors.short_writes", 1000),
    Campaign("operations that hang for a while", "io_errors.slow_operations", 1000),
    Campaign("several leaves fail at once", "io_errors.failing_leaves", 40),
    Campaign("every read of a restore fails", "io_errors.failing_reads", 1000),
    Campaign("a commit is cancelled at every file operation", "cancels.cancelled_commits", 1000),
    Campaign("a call is cancelled at every file operation", "cancels.cancelled_calls", 1000),
    Campaign("one flipped bit", "damage.flips", 3000),
    Campaign("files cut, extended, deleted, zeroed, swapped, flipped", "damage.damage", 4000),
    Campaign("one flipped bit of a replica: saves", "bit_flips.replicas", 1000),
    Campaign("one flipped bit of a replica: the devices' pass alone", "bit_flips.passes", 3000),
    Campaign("one bit flips between a device and the digests", "bit_flips.staged", 3000),
    Campaign("one bit of an array flips on the disk", "bit_flips.stored", 3000),
    Campaign("manifests made to harm", "mutations.mutations", 100_000),
    Campaign("two processes save the same steps", "races.same_steps", 200),
    Campaign("two processes save and delete beside each other", "races.different_steps", 200),
    Campaign("cleaners beside live and stopped writers", "races.sweeps", 200),
    Campaign(
        "an evaluator reads steps that are being deleted", "readers.steps_beside_a_trainer", 4000
    ),
    Campaign("an evaluator reads the latest step", "readers.latest_beside_a_trainer", 2000),
    Campaign("random operations against a model", "machine.machine", 2000),
    Campaign(
        "saves in a row: memory, files and threads stay flat", "endurance.saves_in_a_row", 1000
    ),
    Campaign("one process of a job meets an error, at every stage", "jobs.errors", 100),
    Campaign("one process of a job is stopped, at every stage", "jobs.stops", 100),
    Campaign("one process of a job is killed, at every stage", "jobs.kills", 100),
    Campaign("managers in 8 threads", "threads.managers_in_threads", 50),
    Campaign("managers in 8 tasks", "threads.managers_in_tasks", 50),
    Campaign("one manager in 8 threads", "threads.one_manager_in_threads", 50),
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[""], help="parts of names of campaigns")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full counts")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    chosen = [each for each in CAMPAIGNS if any(part in each.function for part in options.only)]
    # What is said of faults that were made on purpose would bury the counts.
    logging.getLogger("ckpt").setLevel(logging.CRITICAL)
    lost = 0
    for campaign in chosen:
        count = max(1, round(campaign.count * options.scale))
        sys.stdout.write(f"{campaign.function}, {count} times\n")
        sys.stdout.flush()
        tally, seconds = run(campaign, count, options.seed)
        for line in tally.losses:
            sys.stdout.write(f"  LOST: {line}\n")
        sys.stdout.write(f"  {tally.runs} runs, {tally.faults} faults, {len(tally.losses)} lost, ")
        sys.stdout.write(f"{seconds:.0f} s\n")
        lost += len(tally.losses)
        record(campaign, tally, seconds)
    return 1 if lost else 0


def run(campaign: Campaign, count: int, seed: int) -> tuple[Tally, float]:
    module, _, name = campaign.function.rpartition(".")
    function = getattr(importlib.import_module(f"tests.reliability.{module}"), name)
    with tempfile.TemporaryDirectory(prefix="ckpt-campaign-") as directory:
        began = time.perf_counter()
        return function(Path(directory), count, seed), time.perf_counter() - began


def record(campaign: Campaign, tally: Tally, seconds: float) -> None:
    """Record a campaign in place of its earlier run, in the order of the list."""
    done = Record(
        campaign.name,
        campaign.function,
        tally.runs,
        tally.faults,
        len(tally.losses),
        round(seconds, 1),
        f"{datetime.date.today()}, Python {platform.python_version()}, jax {jax.__version__}",
    )
    known = {each.campaign: each for each in report.read()} | {done.campaign: done}
    order = [each.function for each in CAMPAIGNS]
    records = [known[function] for function in order if function in known]
    report.write(records)
    report.PAGE.write_text(report.updated(report.PAGE.read_text(), records))


if __name__ == "__main__":
    let_programs_import_tests()
    sys.exit(main())
