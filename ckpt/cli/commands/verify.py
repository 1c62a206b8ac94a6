"""`ckpt verify`: comparison of a checkpoint, or of all steps of a root, with manifests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import anyio
import click

from ckpt._tree.table import format_bytes
from ckpt.cli import exit_status, options
from ckpt.cli.output import Duration, count_text, printable, show, show_lines
from ckpt.cli.progress import progress

if TYPE_CHECKING:
    from ckpt._engine.verify.report import VerifyReport
    from ckpt._inspection.verified_steps import Verification

_MOST_SEEDS = 1 << 32


@click.command()
@options.path
@click.option("--shallow", is_flag=True, help="Compare names and sizes only; read no data.")
@click.option(
    "--sample",
    callback=options.share,
    metavar="SHARE",
    help="Read a random share of the files and bytes of each step, such as 5%.",
)
@click.option(
    "--timeout",
    type=Duration(zero=True),
    metavar="TIME",
    help="Begin no more files after this time, such as 60s or 2h.",
)
@click.option(
    "--seed", type=int, metavar="NUMBER", help="Repeat the choice of an earlier --sample."
)
@options.as_json
def verify(
    path: str,
    shallow: bool,
    sample: float | None,
    timeout: float | None,
    seed: int | None,
    as_json: bool,
) -> int:
    """Compare a checkpoint, or every step of a root, with its manifest, byte by byte.

    What was not read because of --sample or --timeout is told; names and sizes of all files are
    compared in any case. Exit status 1 if anything is damaged.
    """
    if shallow and (sample is not None or timeout is not None):
        raise click.UsageError("--shallow reads nothing: leave out --sample and --timeout.")
    if sample is not None and seed is None:
        seed = random.randrange(_MOST_SEEDS)
    found = _verified(path, not shallow, sample, seed, timeout, as_json)
    show(found, _summary, as_json=as_json)
    return exit_status.OK if found.ok else exit_status.FOUND


def _verified(
    path: str,
    deep: bool,
    sample: float | None,
    seed: int | None,
    timeout: float | None,
    as_json: bool,
) -> Verification:
    from ckpt._engine.verify.report import read_limits
    from ckpt._inspection.verified_steps import verify_at

    with progress("verify") as line:

        def begins(name: str, place: int, count: int) -> None:
            line.name(f"verify {name}" + (f" ({place} of {count})" if count > 1 else ""))

        def told(report: VerifyReport) -> None:
            if not as_json:
                show_lines(_lines(report))

        limits = read_limits(deep, sample, None if sample is None else seed, timeout)
        return anyio.run(verify_at, path, deep, limits, line, told, begins)


def _lines(report: VerifyReport) -> Iterator[str]:
    first, *rest = str(report).splitlines()
    yield printable(first) if report.ok else click.style(printable(first), bold=True)
    yield from map(printable, rest)


def _summary(found: Verification) -> Iterator[str]:
    for each in found.skipped:
        yield f"step {each.step} was not verified: {printable(each.reason)}"
    if found.is_root:
        text = count_text(len(found.steps), "step") if found.steps else "no steps"
        damaged = sum(not report["ok"] for report in found.steps)
        verdict = "nothing is wrong" + (" in what was read" if found.unread_files else "")
        if damaged:
            verdict = f"{damaged} damaged"
        if found.steps:
            text = f"{text}, {verdict} ({_part(found)})"
        yield click.style(f"{printable(found.path)}: {text}", dim=not damaged)
    if found.seed is not None:
        yield click.style(f"the same files again: --seed {found.seed}", dim=True)


def _part(found: Verification) -> str:
    files = count_text(found.files, "file")
    if not found.deep:
        return f"{files}, names and sizes only"
    if not found.unread_files:
        return f"{files}, {format_bytes(found.nbytes)} read"
    total = format_bytes(found.nbytes + found.unread_nbytes)
    read = f"{found.files - found.unread_files:,} of {files} read"
    return f"{read}, {format_bytes(found.nbytes)} of {total}"
