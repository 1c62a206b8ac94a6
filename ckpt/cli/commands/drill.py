"""`ckpt drill`: a program is killed and resumed, and has to repeat what it does without a kill."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from ckpt.cli import exit_status, options
from ckpt.cli.output import Duration, note, printable, show

if TYPE_CHECKING:
    from ckpt._proof.drill import DrillReport


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--steps", default=20, metavar="NUMBER", help="The last step to compare.")
@click.option("--kills", default=1, metavar="NUMBER", help="Kill and resume it so many times.")
@click.option(
    "--devices",
    type=int,
    multiple=True,
    metavar="NUMBER",
    help="Resume it on so many devices; once for each kill.",
)
@click.option("--seed", type=int, metavar="NUMBER", help="Repeat the moments of the kills.")
@click.option(
    "--timeout",
    type=Duration(),
    default="10min",
    metavar="TIME",
    help="Time that each run may take.",
)
@options.as_json
def drill(
    command: tuple[str, ...],
    steps: int,
    kills: int,
    devices: tuple[int, ...],
    seed: int | None,
    timeout: float,
    as_json: bool,
) -> int:
    """Kill a training program, resume it, and compare its steps with those of a run without a kill.

    COMMAND is the program with its arguments, after --. It calls mgr.mark(step, state) at the
    beginning of each step. Its managers write to scratch roots, and never to their own. Exit status
    1 if a step differs.
    """
    from ckpt._proof.drill import drill as run

    found = run(
        command,
        steps=steps,
        kills=kills,
        devices=devices,
        seed=seed,
        timeout=timeout,
        tell=lambda text: note(f"ckpt: {text}"),
    )
    show(found, _view, as_json=as_json)
    return exit_status.OK if found.ok else exit_status.FOUND


def _view(found: DrillReport) -> Iterator[str]:
    yield from map(printable, str(found).splitlines())
