"""`ckpt watch`: the saves of a run in progress."""

from __future__ import annotations

import math
import os
import time

import anyio
import click

from ckpt._inspection.followed_run import FollowedRun, GoneAttempt, Look, SeenAttempt, SeenStep
from ckpt._tree.table import format_bytes
from ckpt.cli import exit_status, options
from ckpt.cli.output import (
    Duration,
    count_text,
    metric_text,
    note,
    printable,
    rate_text,
    seconds_text,
    show_json,
)
from ckpt.cli.progress import LiveLine
from ckpt.errors import InvalidArgumentError, StorageError
from ckpt.storage._resolve import local_path

_DISK_SECONDS, _STORE_SECONDS = 0.5, 5.0
_MOST_FAILURES = 5
_STALLED_SECONDS = 60.0


@click.command()
@click.argument("root", type=options.PATH)
@click.option("--until", type=click.IntRange(min=0), help="End once there is this step or a later.")
@click.option("--after", type=click.IntRange(min=0), help="Begin with existing steps after this.")
@click.option("--timeout", type=Duration(zero=True), help="End if no step comes for so long (10m).")
@click.option("--every", type=Duration(), help="How often to look; 0.5s on a disk, 5s in a store.")
@options.as_json
def watch(
    root: str,
    until: int | None,
    after: int | None,
    timeout: float | None,
    every: float | None,
    as_json: bool,
) -> int:
    """Follow the saves of a running job.

    There is a line for each step that it commits, and one for the save under way. Nothing is
    pinned or written. A root that does not exist yet is waited for. Exit status 1: the time was
    up.
    """
    local = local_path(root)
    if local is not None and not os.path.isdir(local.parent):
        raise InvalidArgumentError(f"{root}: there is no directory {local.parent}")
    if local is not None and os.path.exists(local) and not os.path.isdir(local):
        raise InvalidArgumentError(f"{root} is not a directory, so it is no root of steps")
    pause = every or (_STORE_SECONDS if local is None else _DISK_SECONDS)
    with LiveLine() as line:
        run = FollowedRun(root)
        view = _JsonView() if as_json else _TextView(line, run)
        return anyio.run(_follow, run, view, until, after, timeout, pause)


class _TextView:
    """Shows a run to people."""

    def __init__(self, line: LiveLine, run: FollowedRun) -> None:
        self._line = line
        self._run = run

    def begin(self) -> None:
        """Print the number of existing steps and the latest one."""
        if self._run.latest is not None:
            count = count_text(self._run.count, "step")
            note(f"{count} so far, the latest is {self._run.latest}")

    def show(self, look: Look) -> None:
        for gone in look.gone:
            text = f"step {gone.step}: its attempt is gone, and there is no such step"
            self._line.above(click.style(text, fg="yellow"))
        for each in look.steps:
            self._line.above(_step_line(each))
        attempts = ", ".join(map(_attempt_text, look.attempts))
        latest = "" if self._run.latest is None else f"; the latest step is {self._run.latest}"
        self._line.show(attempts or f"waiting for a step{latest}")


class _JsonView:
    """Shows a run to programs: prints a line for everything that is new."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}

    def begin(self) -> None:
        """Print nothing: existing steps are not new."""

    def show(self, look: Look) -> None:
        found: list[GoneAttempt | SeenStep | SeenAttempt] = [*look.gone, *look.steps]
        found += [each for each in look.attempts if self._bytes.get(each.id) != each.nbytes]
        self._bytes = {each.id: each.nbytes for each in look.attempts}
        for each in found:
            show_json(each)


async def _follow(
    run: FollowedRun,
    view: _TextView | _JsonView,
    until: int | None,
    after: int | None,
    patience: float | None,
    pause: float,
) -> int:
    await run.begin(after)
    view.begin()
    deadline = math.inf if patience is None else time.monotonic() + patience
    failures = 0
    while True:
        try:
            look = await run.look()
            failures = 0
        except StorageError:
            failures += 1
            if failures > _MOST_FAILURES:
                raise
            look = Look()
        view.show(look)
        if look.steps and patience is not None:
            deadline = time.monotonic() + patience
        if until is not None and run.latest is not None and run.latest >= until:
            return exit_status.OK
        left = deadline - time.monotonic()
        if left <= 0:
            return exit_status.FOUND
        await anyio.sleep(min(pause, left))


def _step_line(step: SeenStep) -> str:
    when = "" if step.committed is None else f"{step.committed.astimezone():%H:%M:%S}  "
    metrics = [f"{name}={metric_text(value)}" for name, value in step.metrics.items()]
    parts = [
        *([] if step.stored_bytes is None else [format_bytes(step.stored_bytes)]),
        *([rate_text(step.rate)] if step.rate is not None else []),
        *([f"blocked {seconds_text(step.blocked)}"] if step.blocked is not None else []),
        *metrics,
        *(["overwritten"] if step.overwritten else []),
    ]
    number = click.style(f"step {step.step}", bold=True)
    return f"{when}{number}  {printable('  '.join(parts))}"


def _attempt_text(attempt: SeenAttempt) -> str:
    text = f"step {attempt.step}: {format_bytes(attempt.nbytes)}"
    if attempt.expected_bytes:
        text += f" of about {format_bytes(attempt.expected_bytes)}"
    if attempt.still_seconds >= _STALLED_SECONDS:
        return f"{text}, nothing new for {seconds_text(attempt.still_seconds)}"
    return f"{text}, for {attempt.seconds:.0f} s"
